"""What the adapter over torch.distributed saves is resumed bit for bit, by itself and by Horovod's, and vice versa."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dgc_horovod.torch import ddp
from dgc_horovod.torch.ddp import load_checkpoint, load_residuals, register, save_checkpoint, save_residuals
from tests.helpers.adapters import Adapter, Compression
from tests.helpers.ddp_training import made, one_batch, sgd, step
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.regression import batches, fingerprint

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
STEPS = 6
FEW = Compression.dgc(0.02, min_numel=64)


def _started(adapter: Adapter) -> Any:
    return adapter.start(FEW, momentum=0.9, weight_decay=1e-3, nesterov=True)


def save(adapter: Adapter, folder: Path) -> tuple[str, dict[str, Any]]:
    """On a rank: half a training, a checkpoint, and the second half; returns how that ends."""
    run = _started(adapter)
    run.train(STEPS)
    run.save(folder, epoch=7)
    run.train(STEPS)
    same_on_ranks(run.print)
    return run.print, {"epoch": 7}


def resume(adapter: Adapter, folder: Path) -> tuple[str, dict[str, Any]]:
    """On a rank: the second half, from a checkpoint of either adapter."""
    run = _started(adapter)
    extra = run.load(folder)
    run.steps = STEPS
    run.train(STEPS)
    same_on_ranks(run.print)
    return run.print, extra


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder of each adapter, and how a training ends that was resumed from it by each; by adapter."""
    names = ("DDP", "Horovod")
    folders = {name: tmp_path_factory.mktemp("checkpoint") for name in names}
    ends = {(name, name, "saved"): _call(save, name, folder) for name, folder in folders.items()}
    for reader in reversed(names):  # ranks of one adapter are up at a time
        ends |= {(writer, reader, "resumed"): _call(resume, reader, folder) for writer, folder in folders.items()}
    return folders, ends


def _call(what: Any, name: str, folder: Path, workers: int = 2) -> list[Any]:
    adapter = Adapter(name)
    return on_ranks(what, workers, adapter.kind, arguments={"adapter": adapter, "folder": folder})


@pytest.mark.on_ranks(0)
@pytest.mark.parametrize("reader", ["DDP", "Horovod"])
@pytest.mark.parametrize("writer", ["DDP", "Horovod"])
def test_resumed_bit_for_bit_by_both(checkpoints, writer, reader):
    _, ends = checkpoints
    assert ends[writer, reader, "resumed"] == ends[writer, writer, "saved"]


@pytest.mark.slow
@pytest.mark.on_ranks(0)
def test_resumed_with_another_number_of_ranks(checkpoints):
    found = _call(resume, "DDP", checkpoints[0]["DDP"], workers=3)
    assert [extra for _, extra in found] == [{"epoch": 7}] * 3


def _trained(model: Any, optimizer: Any, part: int) -> str:
    """A first or second half, 0 or 1."""
    for x, y in list(batches(2 * STEPS, dist.get_rank()))[part * STEPS : (part + 1) * STEPS]:
        step(model, optimizer, x, y)
    return fingerprint(model)


def test_uncompressed(tmp_path):
    """Stock DDP saves and loads in the same way."""
    pair, again = made(ddp.Compression.none), made(ddp.Compression.none)
    _trained(*pair, 0)
    save_checkpoint(tmp_path, *pair)
    load_checkpoint(tmp_path, *again)
    assert _trained(*pair, 1) == _trained(*again, 1)


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    ("make", "compression"),
    [(sgd, FEW), (_adamw, FEW), (_adamw, Compression.local(steps=2, min_numel=64, outer_momentum=0.5))],
    ids=["SGD", "AdamW", "local"],
)
def test_residuals_beside_another_checkpoint(make, compression, tmp_path):
    """As frameworks save: their own checkpoints lost residuals, and nobody said so."""
    model, optimizer = made(compression, make, broadcast_buffers=False)
    _trained(model, optimizer, 0)
    with messages() as said:
        optimizer.state_dict()
        optimizer.state_dict()
    assert len(said) == (dist.get_rank() == 0) and all("state_dict() holds no residuals" in text for text in said)
    save_residuals(tmp_path, optimizer)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, other = made(None, make, broadcast_buffers=False)
    resumed.load_state_dict(state[0])
    other.load_state_dict(state[1])  # as frameworks do, before there is a callback that registers
    register(resumed, other, compression)
    with messages() as later:
        load_residuals(tmp_path, other)
        other.state_dict()
    assert not later
    assert _trained(model, optimizer, 1) == _trained(resumed, other, 1)


def test_refused(tmp_path):
    """Between backward and step, and from an optimizer of nobody."""
    model, optimizer = made(FEW)
    x, y = one_batch()
    F.mse_loss(model(x), y).backward()
    under_way = error_of(lambda: save_checkpoint(tmp_path, model, optimizer))
    assert "CheckpointError: saving to" in under_way and "between two steps only" in under_way
    stock = error_of(lambda: save_checkpoint(tmp_path, model, sgd(model)))
    assert "UnsupportedUse: pass the optimizer that was passed to register()" in stock
    assert "CheckpointError" in error_of(lambda: load_checkpoint(tmp_path / "none", model, optimizer))
    group = {"params": [torch.nn.Parameter(torch.zeros(1))]}
    assert "add_param_group after wrapping" in error_of(lambda: optimizer.add_param_group(group))
    assert "already wrapped" in error_of(lambda: register(model, optimizer, FEW))
