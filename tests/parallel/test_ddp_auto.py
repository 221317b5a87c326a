"""Compression.auto under DDP, on real ranks without Horovod: what scripts do that DDP runs. See test_auto.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dgc_horovod.planning.trial import COMPRESSED, DENSE, MOST_TIMED, SETTLING
from dgc_horovod.testing.torch import session, take
from dgc_horovod.torch.ddp import Compression, register
from tests.helpers.ddp_training import made, train
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import batches, distance, fingerprint, nesterov, weights

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
STEPS = 24


def _started(mode: str | None = None, **fields: Any) -> tuple[Any, Any]:
    model, optimizer = made(Compression.auto(**{"density": 0.05, "min_numel": 16, **fields}), nesterov)
    if mode is not None:
        take(optimizer, mode)
    return model, optimizer


def test_two_gradients_are_no_step_that_can_be_compressed():
    """Two exchanged backward passes a step."""
    model, optimizer = _started(density=0.01)
    for x, y in batches(3 * (SETTLING + MOST_TIMED), dist.get_rank()):
        optimizer.zero_grad()
        for half in (slice(8), slice(8, None)):
            F.mse_loss(model(x[half]), y[half]).backward()
        optimizer.step()
    choice = session(optimizer).strategy.choice
    assert choice.ended and COMPRESSED not in choice.seconds
    same_on_ranks(fingerprint(model))


def test_a_scaler_that_skips_is_no_accumulation():
    model, optimizer = _started()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the first steps overflow
    train(model, optimizer, 10, scaler)
    assert not session(optimizer).strategy.choice.script_accumulates and scaler.get_scale() < 2.0**127


@pytest.mark.parametrize("mode", [DENSE, COMPRESSED])
def test_hooks_are_called_once_a_step_after_loading(mode):
    model, optimizer = _started(mode)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 3)
    assert len(calls) == 3


@pytest.mark.parametrize("first", [Compression.local(steps=4), Compression.dgc(0.05)], ids=["local", "dgc"])
@pytest.mark.parametrize("halves", [False, True])
def test_a_model_is_given_back_to_ddp(first, halves):
    """One that was compressed, or trained with local steps, is DDP's own again; the first optimizer lives."""
    model, before = made(first, nesterov)
    optimizer = register(model, nesterov(model), Compression.fp16 if halves else Compression.none)
    train(model, optimizer, STEPS)
    stock, inner = made(None, nesterov)
    if halves:
        stock.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(stock, inner, STEPS)
    if halves:  # torch's hook divides before the sum and ours after it, which small gradients tell apart
        assert 0 < distance(weights(stock), weights(model)) < 1e-3
    else:
        assert fingerprint(model) == fingerprint(stock)
    assert "wrapped by another" in error_of(before.step)
    same_on_ranks(fingerprint(model))
