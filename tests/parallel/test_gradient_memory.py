"""Updates are put together where gradients are, and nothing that shares their memory is harmed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import batches, fingerprint, made

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_put_together_in_the_gradients_memory(dtype):
    """Where they do not fit, beside it."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
    model, optimizer = made(Compression.dgc(0.05), inner=inner)
    model(torch.randn(4, 32, dtype=dtype)).pow(2).sum().backward()
    places = [p.grad.data_ptr() for p in model.parameters()]
    optimizer.step()
    if dtype == torch.float32:
        assert [p.grad.data_ptr() for p in model.parameters()] == places
    assert not any(run.outputs for run in session(optimizer).exchange.runs), "nothing is held"


def _trained(before_step: Callable[[Any], None] = lambda p: None, sparse: bool = False) -> str:
    """Fingerprint after five steps, before which something was done to each parameter, or each that is compressed."""
    model, optimizer = made(Compression.dgc(0.05))
    for x, y in batches(5, hvd.rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for p in session(optimizer).exchange.sparse if sparse else model.parameters():
            before_step(p)
        optimizer.step()
    return fingerprint(model)


def _replaced(p: Any) -> None:
    p.grad = p.grad.clone()


def _by_other_memory(p: Any) -> None:
    p.grad.data = p.grad.data.clamp(-1e-4, 1e-4)


@pytest.mark.parametrize("replace", [_replaced, _by_other_memory])
def test_gradients_that_a_script_replaced_still_get_the_update(replace):
    """What stands there during the exchange counts for nothing."""
    found = _trained(replace)
    assert found == _trained()
    same_on_ranks(found)


def _in_place(p: Any) -> None:
    p.grad.add_(torch.randn_like(p))


def _by_data(p: Any) -> None:
    p.grad.data.add_(torch.randn_like(p))


def _by_numpy(p: Any) -> None:
    p.grad.numpy()[...] += 1 + hvd.rank()


def _then_replaced(p: Any) -> None:
    p.grad.add_(torch.randn_like(p))
    p.grad = p.grad.clone()


@pytest.mark.parametrize("write", [_in_place, _by_data, _by_numpy, _then_replaced])
def test_what_a_script_writes_too_late_reaches_no_weight(write):
    """A rank's own noise, written into p.grad when it had been taken already."""
    found = _trained(write, sparse=True)
    assert found == _trained()
    same_on_ranks(found)
