"""Checkpoints: training goes on bit for bit, from those of the same adapter and of the other one."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import kept_by
from dgc_horovod.torch import ddp
from dgc_horovod.torch.ddp import (
    Compression,
    load_checkpoint,
    load_residuals,
    register,
    save_checkpoint,
    save_residuals,
)
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.regression import batches, fingerprint, smooth_model
from tests.helpers.sealed import OF_TORCH, outcomes

STEPS = 6


def compression() -> Any:
    """The one of all runs."""
    return Compression.dgc(0.02, min_numel=64)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True)


def train(model: Any, optimizer: Any, rank: int, part: int) -> None:
    """A first or second half, 0 or 1."""
    for x, y in list(batches(2 * STEPS, rank))[part * STEPS : (part + 1) * STEPS]:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def _made(given: Any = None) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(smooth_model())
    return model, register(model, sgd(model), given or compression())


def saved() -> dict[str, Any]:
    """Half a training, a checkpoint, and the second half."""
    model, optimizer = _made()
    train(model, optimizer, dist.get_rank(), 0)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer, epoch=7)
    train(model, optimizer, dist.get_rank(), 1)
    return {"weights": fingerprint(model)}


def resumed() -> dict[str, Any]:
    """The second half, from a checkpoint of either adapter."""
    model, optimizer = _made()
    extra = load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    train(model, optimizer, dist.get_rank(), 1)
    return {"weights": fingerprint(model), **extra}


def uncompressed() -> dict[str, Any]:
    """Stock DDP saves and loads in the same way."""
    found = []
    for part in (0, 1):
        model, optimizer = _made(Compression.none)
        if part:
            load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
        else:
            train(model, optimizer, dist.get_rank(), 0)
            save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
        train(model, optimizer, dist.get_rank(), 1)
        found.append(fingerprint(model))
    return {"same": found[0] == found[1]}


def residuals_apart() -> dict[str, Any]:
    """A checkpoint of a framework's own, with residuals beside it; and one without, whose user is told."""
    found: dict[str, Any] = {}
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    local = Compression.local(steps=2, min_numel=64, outer_momentum=0.5)
    for name, make, given in (("sgd", sgd, compression()), ("adamw", adamw, compression()), ("local", adamw, local)):
        folder = Path(os.environ["DGC_TEST_FOLDER"]) / name
        model = DistributedDataParallel(smooth_model(), broadcast_buffers=False)
        optimizer = register(model, make(model if make is sgd else model.parameters()), given)
        train(model, optimizer, dist.get_rank(), 0)
        with messages() as said:
            optimizer.state_dict()
            optimizer.state_dict()
        save_residuals(folder, optimizer)
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, dist.get_rank(), 1)
        resumed = DistributedDataParallel(smooth_model(), broadcast_buffers=False)
        other = make(resumed if make is sgd else resumed.parameters())
        resumed.load_state_dict(state[0])
        other.load_state_dict(state[1])  # as frameworks do, before there is a callback that registers
        register(resumed, other, given)
        with messages() as later:
            load_residuals(folder, other)
            other.state_dict()
        train(resumed, other, dist.get_rank(), 1)
        found[name] = [fingerprint(model) == fingerprint(resumed), list(said), list(later)]
    return found


def residuals_and_flush() -> dict[str, Any]:
    """A rank's record is loaded again bit for bit; a flush leaves nothing, and equal weights."""
    model, optimizer = _made()
    train(model, optimizer, dist.get_rank(), 0)
    kept, weights = optimizer.residual_state_dict(), model.state_dict()
    state = copy.deepcopy(optimizer.state_dict())  # loading does not copy
    again, second = _made()
    again.load_state_dict(weights)
    second.load_state_dict(state)
    second.load_residual_state_dict(kept)
    for each in ((model, optimizer), (again, second)):
        train(*each, dist.get_rank(), 1)
    same = fingerprint(model) == fingerprint(again)
    optimizer.flush()
    return {
        "same": same,
        "flushed": fingerprint(model),
        "kept": len(optimizer.residual_state_dict()["tensors"]),
    }


def refused() -> dict[str, str]:
    """Between backward and step, and from an optimizer of nobody."""
    model, optimizer = _made()
    x, y = next(iter(batches(1, dist.get_rank())))
    F.mse_loss(model(x), y).backward()
    place = os.environ["DGC_TEST_FOLDER"]
    return {
        "under way": error_of(lambda: save_checkpoint(place, model, optimizer)),
        "stock": error_of(lambda: save_checkpoint(place, model, sgd(model))),
        "missing": error_of(lambda: load_checkpoint(place + "/none", model, optimizer)),
        "copy": error_of(lambda: copy.deepcopy(optimizer)),
        "group": error_of(lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})),
        "again": error_of(lambda: ddp.register(model, optimizer, compression())),
    }


def sealed() -> dict[str, Any]:
    """Files that somebody has changed and sealed again: one error on every rank, and nothing has changed."""
    model, optimizer = _made()
    train(model, optimizer, dist.get_rank(), 0)
    folder = Path(os.environ["DGC_TEST_FOLDER"])
    save_checkpoint(folder, model, optimizer)
    train(model, optimizer, dist.get_rank(), 1)

    def kept() -> str:
        residuals = {name: [x.tolist() for x in a.values()] for name, a in kept_by(optimizer).tensors.items()}
        return str([fingerprint(model), residuals, optimizer.state_dict()])

    return outcomes(
        OF_TORCH, folder, dist.get_rank() == 0, dist.barrier,
        lambda: error_of(lambda: load_checkpoint(folder, model, optimizer)), kept,
    )  # fmt: skip
