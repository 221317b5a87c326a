"""What a training script may do around the optimizer, and what it must be told when it goes wrong."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.core.selection import ResidualView
from dgc_horovod.kernels.contract import NO_ELEMENTS, Elements
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.calls import calls_to_c
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import UNROUNDED, adamw, batches, distance, fingerprint, sgd, smooth_model, step, weights
from tests.helpers.run import everything
from tests.helpers.together import all_of, call_each
from tests.helpers.training import first_loss, made, momentum_sgd, train
from tests.parallel import test_gradient_memory as memory
from tests.parallel import test_script_clipping as clipping

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
_slow_sgd = partial(sgd, lr=0.02)


def test_few_calls_lie_between_a_hook_and_c():
    model, optimizer = made(Compression.dgc(0.1, min_numel=1, bucket_bytes=1))
    train(model, optimizer, 2)
    with calls_to_c(session(optimizer).exchange.engines[0].kernels) as buckets:
        train(model, optimizer, 1)
    assert len(buckets) > 1 and all(calls[0] == "ready" and len(calls) <= 7 for calls in buckets), buckets


def _scaled(scales: bool = True, overflow_at: int | None = None) -> tuple[nn.Module, Any, float]:
    """Model, optimizer and the last loss scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scales, growth_interval=7)
    model, optimizer = made(Compression.dgc(0.05, compress_1d=True, min_numel=1), _slow_sgd, grad_scaler=scaler)
    for number, (x, y) in enumerate(batches(20, hvd.rank())):
        if number == overflow_at and hvd.rank() == hvd.size() - 1:
            x = x * float("inf")
        step(model, optimizer, x, y, scaler, between=lambda: scaler.unscale_(optimizer))
    return model, optimizer, scaler.get_scale()


def test_loss_scaling():
    """GradScaler: with ``grad_scaler=`` the same bits as without scaling; an overflow on one rank skips all."""
    (plain, _, _), (scaled, _, scale) = _scaled(False), _scaled()
    assert fingerprint(plain) == fingerprint(scaled)
    model, optimizer, fallen = _scaled(overflow_at=5)
    assert fallen < scale and scale > 1024
    arrays = session(optimizer).exchange.state_arrays()
    assert all(torch.from_numpy(a).isfinite().all() for d in arrays.values() for a in d.values())
    assert weights(model).isfinite().all()
    same_on_ranks(fingerprint(model))


def test_gradients_that_are_changed_too_late_are_told():
    with messages() as texts:
        model, optimizer = made(Compression.dgc(0.02))
        first_loss(model).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)
        optimizer.step()
    assert sum("no effect" in text for text in texts) == (hvd.rank() == 0)


def _clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.05, 0.05)


def test_step_hooks_see_the_whole_step_once():
    """A post hook that clamps the weights sees the whole step, once; a pre hook sees every gradient."""
    ends, calls = [], []
    for ours in (False, True):
        model = smooth_model()
        optimizer = made(everything(), inner=model)[1] if ours else momentum_sgd(model)
        if ours:
            optimizer.register_step_pre_hook(
                lambda *_, m=model: calls.append(all(p.grad is not None for p in m.parameters()))
            )
        optimizer.register_step_post_hook(_clamp)
        for x, y in batches(10, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for name, p in () if ours else model.named_parameters():
                p.grad = hvd.allreduce(p.grad, name=name)
            optimizer.step()
        ends.append(weights(model))
    assert distance(*ends) < 1e-5 and calls == [True] * 10


@pytest.mark.parametrize(("stock", "steps"), [(momentum_sgd, 1), (adamw, 10)])
def test_rank_zero_alone_resumes_from_a_stock_checkpoint(stock, steps):
    """Horovod's idiom: rank 0 alone loads a stock checkpoint, then everything is broadcast."""
    model = smooth_model()
    plain, data = stock(model), list(batches(2 * steps, rank=0))  # the same on every rank: stock needs no exchange
    for batch in data[:steps]:
        step(model, plain, *batch)
    again, optimizer = made(everything(), stock)
    if hvd.rank() == 0:
        again.load_state_dict(model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    hvd.broadcast_parameters(again.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for batch in data[steps:]:
        step(model, plain, *batch)
        step(again, optimizer, *batch)
    assert distance(weights(model), weights(again)) <= 1e-5


def test_larger_batch_identity():
    """Sending everything every T steps with m = 0 is one step on a T times larger batch at T times the rate."""
    period, plain = 4, partial(sgd, lr=0.01, momentum=0.0)
    model, optimizer = made(Compression.topk(1.0, compress_1d=True, min_numel=1, **UNROUNDED), plain)
    exchange = session(optimizer).exchange

    def every_period(rule: str, view: ResidualView, k: int, generator: Any) -> Elements:
        return view.largest(k) if exchange.steps % period == period - 1 else NO_ELEMENTS

    with mock.patch("dgc_horovod.core.engine.select", every_period):
        train(model, optimizer, 5 * period)

    larger, stock = made(None, partial(plain, lr=period * 0.01))
    data = list(batches(5 * period, hvd.rank()))
    for first in range(0, len(data), period):
        step(larger, stock, *(torch.cat(parts) for parts in zip(*data[first : first + period], strict=True)))
    assert distance(weights(larger), weights(model)) < 1e-6


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(2, controller="mpi")
def test_all_over_mpi():
    call_each(
        *all_of(__name__), memory.test_gradients_that_a_script_replaced_still_get_the_update,
        clipping.test_both_idioms_give_the_bits_of_clip_norm, clipping.test_a_script_is_told_once,
    )  # fmt: skip


@pytest.mark.on_ranks(1)
def test_single_process_is_the_same_mathematics():
    """Density 1 is plain torch SGD, a low density trains with momentum, nothing is communicated."""
    (model, optimizer), plain = made(everything()), smooth_model()
    train(model, optimizer, 20)
    train(plain, momentum_sgd(plain), 20)
    assert hvd.size() == 1 and optimizer.compression_stats()["bytes_received"] == 0
    assert distance(weights(plain), weights(model)) < 1e-6
    losses = train(*made(Compression.dgc(0.05), _slow_sgd), 60)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.on_ranks(1)
def test_adam_adds_weight_decay_to_gradients_that_are_clipped_before():
    ends = []
    for compresses in (False, True):
        model = smooth_model()
        optimizer: Any = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.1)
        if compresses:
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), everything(clip_norm=0.3))
        for x, y in batches(20, 0):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if not compresses:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        ends.append(weights(model))
    assert distance(*ends) < 1e-5
