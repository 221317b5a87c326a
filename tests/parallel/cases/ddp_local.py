"""Local steps without Horovod: under DDP, and on plain models."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, load_checkpoint, register, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights

H = 5
WHOLE: dict[str, Any] = {"density": 1.0, "local_decay": 1.0, "outer_momentum": 0.0, "outer_rate": 1.0, **UNROUNDED}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def _made(ddp: bool, **fields: Any) -> tuple[Any, Any]:
    model: Any = DistributedDataParallel(smooth_model(), bucket_cap_mb=0.01) if ddp else smooth_model()
    compression = Compression.local(**{"steps": H, "density": 0.1, "min_numel": 64, **fields})
    if ddp:
        return model, register(model, _adamw(model), compression)
    return model, DistributedOptimizer(_adamw(model), model.named_parameters(), compression)


def _train(model: Any, optimizer: Any, data: Any, scaler: Any = None) -> list[str]:
    seen = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append(fingerprint(model))
    return seen


def averaging() -> dict[str, float]:
    """At density 1: each rank trains alone, and every H steps the weights become their mean."""
    alone, found = smooth_model(), {}
    inner = _adamw(alone)
    for step, (x, y) in enumerate(batches(4 * H, dist.get_rank())):
        inner.zero_grad()
        F.mse_loss(alone(x), y).backward()
        inner.step()
        if (step + 1) % H == 0:
            mean = weights(alone)
            dist.all_reduce(mean)
            nn.utils.vector_to_parameters(mean / dist.get_world_size(), alone.parameters())
    for name, ddp, scaler in (
        ("DDP", True, None),
        ("plain", False, None),
        ("scaled", True, torch.amp.GradScaler("cpu")),
    ):
        model, optimizer = _made(ddp, **WHOLE)
        _train(model, optimizer, batches(4 * H, dist.get_rank()), scaler)
        found[name] = distance(weights(alone), weights(model))
    return found


def replicas() -> dict[str, Any]:
    """A run at 10%, 2 bits, on both: weights after each step, and what was received."""
    found: dict[str, Any] = {}
    for name, ddp in (("DDP", True), ("plain", False)):
        model, optimizer = _made(ddp)
        found[name] = _train(model, optimizer, batches(12 * H, dist.get_rank()))
        found[f"{name}, exchanges"] = optimizer.compression_stats()["steps"]
    return found


def resuming() -> dict[str, Any]:
    """Saved in the middle of a round, which an exchange ends, and resumed: the same run, bit for bit."""
    ends = []
    for stops in (False, True):
        model, optimizer = _made(True)
        data = list(batches(6 * H, dist.get_rank()))
        _train(model, optimizer, data[: 2 * H + 2])
        path = os.path.join(os.environ["DGC_TEST_FOLDER"], str(stops))
        save_checkpoint(path, model, optimizer)
        if stops:
            inner = {key: x.clone() for key, x in optimizer.state_dict()["state"][0].items()}
            model, optimizer = _made(True)
            load_checkpoint(path, model, optimizer)
            assert set(inner) == set(optimizer.state_dict()["state"][0])
        _train(model, optimizer, data[2 * H + 2 :])
        ends.append(fingerprint(model))
    optimizer.flush()
    return {"same": ends[0] == ends[1], "flushed": fingerprint(model)}


def refused() -> dict[str, str]:
    """What local steps cannot do."""
    model = smooth_model()
    local = Compression.local(steps=H)
    return {
        "sum": error_of(lambda: DistributedOptimizer(_adamw(model), model.named_parameters(), local, average=False))
    }
