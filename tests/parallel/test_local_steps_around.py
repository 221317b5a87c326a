"""What scripts do around local steps, on real ranks: load, broadcast, freeze, thaw, wrap twice, change weights."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, WarmupSchedule, load_checkpoint, save_checkpoint
from tests.helpers.adapters import Adapter
from tests.helpers.errors import error_of
from tests.helpers.local_training import H, made, wrapped
from tests.helpers.logs import messages
from tests.helpers.training import distance, smooth_model, train, weights
from tests.helpers.training import made as made_per_step

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
OUTER: dict[str, Any] = {"outer_momentum": 0.9, "outer_rate": 0.7, "check_every": 1}


def _apart(model: Any) -> float:
    """How far the ranks' weights are apart, at most."""
    return Adapter("Horovod").apart(weights(model))


def test_a_state_that_is_loaded_in_a_round_leaves_the_ranks_together():
    model, optimizer = made(check_every=1)
    train(model, optimizer, 2 * H + 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2 * H - 2)
    assert _apart(model) == 0


def test_a_state_that_is_broadcast_leaves_the_ranks_together():
    """Between two rounds and in the middle of one; with outer momentum too."""
    model, optimizer = made(**OUTER)
    kept = copy.deepcopy(model.state_dict())
    train(model, optimizer, 2 * H)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = smooth_model(1)
    optimizer = wrapped(resumed, **OUTER)
    if hvd.rank() == 0:
        resumed.load_state_dict(kept)
        optimizer.load_state_dict(saved)
    hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(resumed, optimizer, 2 * H + 2)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(resumed, optimizer, H - 2)
    assert _apart(resumed) == 0
    alien = {**saved, "outer_momentum": {"nobody": torch.zeros(3)}}
    error = error_of(lambda: optimizer.load_state_dict(alien))
    assert "'nobody' fits no parameter of this optimizer" in error


def test_a_layer_that_is_frozen_during_the_training_stays():
    model, optimizer = made()
    train(model, optimizer, 10 * H)
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    train(model, optimizer, 12 * H)  # until the outer momentum is over
    before = model[0].weight.detach().clone()
    train(model, optimizer, 10 * H)
    assert float((model[0].weight - before).norm() / before.norm()) < 1e-4


def test_a_layer_that_is_thawed_is_refused():
    late = smooth_model()
    late[0].weight.requires_grad_(False)
    optimizer = wrapped(late)
    train(late, optimizer, H)
    late[0].weight.requires_grad_(True)
    assert "wrap the optimizer while it requires one" in error_of(lambda: train(late, optimizer, H))


def test_host_memory_changes_nothing_on_a_cpu():
    """What is kept lies in host memory; not a bit changes, though every change is compressed beside p.grad."""
    ends = []
    for offload in (False, True):
        model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        optimizer = wrapped(model, outer_momentum=0.5, outer_rate=0.7, check_every=1, offload=offload)
        model = model.to(memory_format=torch.channels_last)
        for step in range(4 * H + 2):
            optimizer.zero_grad()
            x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            (model(x) - x.mean((1, 2, 3))[:, None]).square().mean().backward()
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.exchange()
        kept = optimizer.residual_state_dict()["tensors"]
        outer = optimizer.state_dict()["outer_momentum"].values()
        optimizer.flush()
        every = [x for arrays in kept.values() for x in arrays.values()]
        ends.append([weights(model), torch.cat([x.flatten() for x in [*every, *outer]])])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True)) and ends[1][1].any()


def test_rounds_that_the_script_ends_early_count_as_they_are():
    """And an optimizer whose model was wrapped again is refused."""
    model, optimizer = made()
    for _ in range(10):
        train(model, optimizer, 1)
        optimizer.exchange()
    optimizer.exchange()
    dense = 10 * 4 * sum(p.numel() for p in model.parameters())
    assert optimizer.compression_stats()["bytes_dense"] == dense
    wrapped(model)
    wrapped(model)
    error = error_of(lambda: train(model, optimizer, 1))
    assert "wrapped again" in error or "UnsupportedUse" in error, error
    assert "a whole number" in error_of(lambda: Compression.local(steps=None))


def test_weights_that_stay_not_finite_are_an_error():
    model, optimizer = made(max_skipped=2)

    def spoil(_: int) -> None:
        if hvd.rank() == 1:
            model[0].weight.data[0, 0] = float("nan")

    error = error_of(lambda: train(model, optimizer, 9 * H, after_step=spoil))
    assert error.startswith("NotFinite: exchange 1: a weight was not finite on rank 1") and "2 in a row" in error


def test_weights_that_a_script_sets_within_a_round():
    """It goes back to others: that is said once, and there are three ways to do it."""
    moved, told = {}, {}
    for name in ("plain", "broadcast", "cleared"):
        model, optimizer = made(density=1.0, values="fp32", dense_values="fp32", outer_momentum=0.5)
        best = {key: x.clone() for key, x in model.state_dict().items()}
        train(model, optimizer, 3 * H + 2)
        with messages() as said:
            model.load_state_dict(best)
            if name == "broadcast":
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            if name == "cleared":
                optimizer.clear_residuals()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            train(model, optimizer, 4 * H)
        moved[name] = distance(torch.cat([x.flatten() for x in best.values()]), weights(model))
        told[name] = sum("within a round" in text for text in said)
    assert moved["plain"] > 0.01 and moved["broadcast"] < 0.5 * moved["plain"] and moved["cleared"] == 0
    assert hvd.rank() or told == {"plain": 1, "broadcast": 0, "cleared": 0}


def test_a_second_optimizer_begins_with_the_same_weights_on_every_rank():
    """It is made in the middle of a round of the first."""
    model, optimizer = made(check_every=1)
    train(model, optimizer, 2 * H + 2)
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.01), check_every=1)
    assert _apart(model) == 0
    train(model, optimizer, 2 * H)
    assert _apart(model) == 0
    train(model, optimizer, 2)
    hvd.broadcast_parameters(list(model.parameters()), 0)
    kept = optimizer if hvd.rank() == 0 else None
    del optimizer
    said = error_of(lambda: wrapped(model, torch.optim.SGD(model.parameters(), 0.01), check_every=1))
    assert "(call exchange())" in said and "RankMismatch" in said
    del kept


def test_steps_of_another_kind_of_run_are_not_counted_as_exchanges(tmp_path):
    """A run with packets at every step goes on with local steps: their warm-up counts exchanges, from none."""
    model, optimizer = made_per_step(
        Compression.dgc(density=0.1, min_numel=64), lambda model: torch.optim.SGD(model.parameters(), 0.01, 0.9)
    )
    train(model, optimizer, 30)
    save_checkpoint(tmp_path, model, optimizer)
    other = smooth_model(1)
    local = wrapped(other, torch.optim.SGD(other.parameters(), 0.01, momentum=0.9), warmup=WarmupSchedule(steps=20))
    load_checkpoint(tmp_path, other, local, residuals="ignored")
    train(other, local, H)
    assert local.compression_stats()["steps"] == session(local).exchange.steps == 1 and _apart(other) == 0
