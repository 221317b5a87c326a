"""Tensors that are small, or not contiguous fp32 on the device that Horovod serves."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn

from dgc_horovod.errors import NotFinite
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, horovod_carrier
from tests.helpers.adapters import Adapter
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.together import all_of, call_each
from tests.helpers.training import UNROUNDED, distance, fingerprint, made, train, weights
from tests.parallel import test_each_adapter

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_follows_its_shadow_in_fp32(dtype):
    """u and v equal those computed in fp32 from the low-precision gradients, bit for bit, wherever nothing was sent."""
    w = nn.Parameter(torch.zeros(40, 50, dtype=dtype))
    sgd = torch.optim.SGD([w], lr=1e-3, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, [("w", w)], Compression.dgc(0.01, **UNROUNDED))
    u = v = torch.zeros(w.numel())
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(8):
        optimizer.zero_grad()
        (w * torch.randn(40, 50, generator=generator).to(dtype)).sum().backward()
        u = u * 0.9 + w.grad.flatten().float()
        v = v + u
        optimizer.step()
        arrays = {name: torch.from_numpy(a) for name, a in session(optimizer).exchange.state_arrays()["w"].items()}
        kept = arrays["v"] != 0
        assert (arrays["v"][kept] == v[kept]).all() and (arrays["u"][kept] == u[kept]).all()
        assert int((~kept).sum()) == 20
        u, v = u * kept, v * kept


class _Half:
    """fp16 weights, and steps whose gradients are all alike."""

    def __init__(self, **fields: Any) -> None:
        self.w = nn.Parameter(torch.zeros(40, 50, dtype=torch.float16))
        sgd = torch.optim.SGD([self.w], lr=1e-6)
        self.optimizer = DistributedOptimizer(sgd, [("w", self.w)], Compression.topk(0.01, **fields))

    def moves(self, gradient: float) -> bool:
        """Whether a step has changed weights."""
        self.optimizer.zero_grad()
        before = self.w.detach().clone()
        (self.w * gradient).sum().backward()
        self.optimizer.step()
        return bool((self.w != before).any())


def test_half_precision_overflow_is_skipped():
    """Every gradient is finite, and an update is not: sent again at every step, it stopped training."""
    run = _Half()
    with messages() as texts:
        moved = [run.moves(6e3 if number < 30 else 6e2) for number in range(40)]
    assert not all(moved[:30]) and all(moved[-10:])
    exchange = session(run.optimizer).exchange
    assert run.w.isfinite().all() and torch.from_numpy(exchange.state_arrays()["w"]["v"]).isfinite().all()
    assert run.optimizer.compression_stats()["skipped"] == moved.count(False)
    assert {where for _, where in exchange.counts.skips} == {"no rank: an update was too large"}
    same_on_ranks(moved, float(run.w.detach().double().sum()))
    said = [text for text in texts if "large" in text or "finite" in text]
    assert len(said) == (hvd.rank() == 0)
    assert all("an update was too large" in text and "a gradient was not finite" not in text for text in said)


def test_half_precision_overflow_stops_a_job_that_is_to_stop():
    run = _Half(on_nonfinite="stop")
    with pytest.raises(NotFinite, match="an update was too large for its parameter's dtype"):
        for _ in range(30):
            run.moves(6e3)


def test_tensors_that_horovod_cannot_take_go_through_host_memory():
    """A Horovod without CUDA ends the process when it is given a CUDA tensor."""
    ends = []
    for by_host in (False, True):
        compression = Compression.dgc(0.05, dense_values="fp32", check_every=1, on_mismatch="broadcast")
        model, optimizer = made(compression)
        with mock.patch.object(horovod_carrier, "needs_host", return_value=by_host) as needs_host:
            train(model, optimizer, 3)
            if hvd.rank() == 1:  # the others' weights come back by broadcasts
                with torch.no_grad():
                    model[0].bias += 1
            train(model, optimizer, 3)
        ends.append(fingerprint(model))
    assert needs_host.call_count > 12, "gradients and broadcasts go this way"
    assert ends[0] == ends[1]
    same_on_ranks(ends)


WAYS = ("fp32", "fp16", "bf16", "8bit", "auto")


@functools.cache
def _trained(way: str) -> tuple[nn.Module, list[float], int]:
    """Model, losses and bytes sent after 30 steps, in which nothing but the small tensors' values differs."""
    model, optimizer = made(Compression.dgc(0.05, values="fp32", dense_values=way, clip_norm=1.0))
    losses = train(model, optimizer, steps=30)
    return model, losses, optimizer.compression_stats()["bytes_sent"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_biases_and_norms(way):
    exact, (model, losses, _) = _trained("fp32")[0], _trained(way)
    least, most = (0, 0) if way == "fp32" else (1e-7, 5e-2)
    assert least <= distance(weights(exact), weights(model)) <= most, "fewer bits do travel, and cost little"
    assert sum(losses[-5:]) < sum(losses[:5])
    same_on_ranks(fingerprint(model))


def test_fewer_bits_are_fewer_bytes():
    sent = {way: _trained(way)[2] for way in WAYS}
    assert sent["auto"] == sent["8bit"] < sent["bf16"] < sent["fp32"] and sent["fp16"] < sent["fp32"]


@pytest.mark.parametrize("way", ["fp32", "8bit"])
def test_a_model_of_small_tensors_is_told_so(way):
    with messages() as texts:
        made(Compression.dgc(0.05, dense_values=way), inner=nn.Linear(4, 4))
    assert sum("NOTHING IS COMPRESSED" in text for text in texts) == (hvd.rank() == 0), texts


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(2, controller="mpi")
def test_all_over_mpi():
    call_each(*all_of(__name__), test_each_adapter.test_gradients_in_float64_are_clipped, adapter=Adapter("Horovod"))
