"""Messages that are late, over torch.distributed, whose collectives match by their order: see `tests.helpers.late`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
from tests.helpers.late import SPEEDS, adamw, ready
from tests.helpers.regression import batches, fingerprint, smooth_model


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (_sgd, {}),
    "clipped": (_sgd, {"clip_norm": 0.5}),
    "AdamW, small tensors dense": (adamw, {"dense_values": "fp32"}),
}


def _trained(make: Any, fields: dict[str, Any], in_ddp: bool) -> str:
    compression = Compression.dgc(**{"density": 0.05, "min_numel": 16, "bucket_bytes": 1024, **fields})
    model: Any = smooth_model()
    if in_ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=0.002)
        optimizer = register(model, make(model), compression)
    else:
        optimizer = DistributedOptimizer(make(model), model.named_parameters(), compression)
    for number, (x, y) in enumerate(batches(6, dist.get_rank())):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if in_ddp and number > 3:  # norms of all ranks are shared then, among the other collectives
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return fingerprint(model)


def same_weights() -> dict[str, dict[str, str]]:
    """Weights after some steps, by run and speed, of a DDP model and of a plain one."""
    found: dict[str, dict[str, str]] = {}
    for name, (make, fields) in RUNS.items():
        for in_ddp in (True, False):
            for speed in SPEEDS:
                with ready(speed, dist.get_rank()):
                    weights = _trained(make, fields, in_ddp)
                found.setdefault(f"{name}, {'DDP' if in_ddp else 'plain'}", {})[speed] = weights
    return found


def on_nodes() -> dict[str, dict[str, str]]:
    """As `same_weights`, on nodes of several workers."""
    found: dict[str, dict[str, str]] = {}
    for name, fields in {"flat": {}, "clipped": {"clip_norm": 0.5}, "dense": {"dense_values": "fp32"}}.items():
        for speed in SPEEDS:
            with ready(speed, dist.get_rank()):
                weights = _trained(_sgd, {"exchange": "hierarchical", **fields}, in_ddp=False)
            found.setdefault(name, {})[speed] = weights
    return found
