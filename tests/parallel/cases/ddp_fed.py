"""Both PyTorch adapters on the same ranks and fed gradients: Horovod, and torch.distributed with DDP and without."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.config import DGCConfig
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, ddp, node_process_sets
from tests.helpers.fed import DENSITY, MIN_NUMEL, RATE, SETTINGS, SHAPES, gradients, looked_at
from tests.helpers.regression import fingerprint

BASE = {"density": DENSITY, "min_numel": MIN_NUMEL}
PRESETS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (Compression.dgc(**{**BASE, **fields}), options) for name, (fields, options) in SETTINGS.items()},
    "topk": (Compression.topk(**BASE), {"momentum": 0.9}),
    "sampled": (Compression.sampled(**BASE), {"momentum": 0.9}),
    "gaussian": (Compression.gaussian(**BASE), {}),
    "random": (Compression.random(**BASE), {"momentum": 0.9, "weight_decay": 0.01}),
    "threshold": (Compression.threshold(5.0, min_numel=MIN_NUMEL), {"momentum": 0.9}),
    "sharded": (Compression.dgc(**BASE, exchange="sharded", bucket_bytes=9000), {"momentum": 0.9, "nesterov": True}),
    "warm-up": (Compression.dgc(**BASE, warmup=ddp.WarmupSchedule(steps=4)), {"momentum": 0.9, "weight_decay": 0.01}),
    "fp32 beside": (Compression.dgc(**BASE, dense_values="fp32"), {"momentum": 0.9}),
    "fp16 beside": (Compression.dgc(**BASE, dense_values="fp16"), {"momentum": 0.9}),
}
FEW = ("nesterov, clipped, per tensor", "gaussian, 4 bit, small buckets", "random", "threshold", "sharded", "warm-up")
NODES = {  # of two workers each, for four ranks
    "nodes": (Compression.dgc(**BASE, exchange="hierarchical", node_size=2), {"momentum": 0.9}),
    "nodes, clipped": (
        Compression.dgc(**BASE, exchange="hierarchical", node_size=2, clip_norm=20.0, bucket_bytes=9000),
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
    "nodes, sharded": (
        Compression.dgc(**BASE, exchange="hierarchical+sharded", node_size=2, bucket_bytes=9000),
        {"momentum": 0.9},
    ),
}
SUMMED = ("scattered", "warm-up", "fp32 beside", "fp16 beside")  # by an allreduce, whose order is the library's


class _Fed(nn.Module):
    """A model whose gradients are what it is fed."""

    def __init__(self) -> None:
        super().__init__()
        for key, shape in SHAPES.items():
            self.register_parameter(key, nn.Parameter(torch.zeros(shape)))

    def forward(self, fed: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * fed[key]).sum() for key, p in self.named_parameters())


@contextmanager
def process_group() -> Iterator[None]:
    """torch.distributed between Horovod's ranks."""
    hvd.init(process_sets=node_process_sets(2))
    folder = tempfile.mkdtemp(prefix="dgc-fed-") if hvd.rank() == 0 else None
    folder = hvd.broadcast_object(folder, 0, name="folder")
    dist.init_process_group("gloo", f"file://{os.path.join(folder, 'store')}", rank=hvd.rank(), world_size=hvd.size())
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _run(make: Callable[[nn.Module], torch.optim.Optimizer], wrap: Callable[[nn.Module, Any], Any], ddps: bool) -> Any:
    model: Any = DistributedDataParallel(_Fed(), bucket_cap_mb=0.01) if ddps else _Fed()
    optimizer = wrap(model, make(model))
    rows = []
    for step in gradients(hvd.rank()):
        optimizer.zero_grad()
        model({key: torch.from_numpy(x) for key, x in step.items()}).backward()
        optimizer.step()
        buckets = session(optimizer).exchange
        rows.append({**looked_at(buckets), "weights": fingerprint(model), "node size": buckets.topology.node_size})
    return rows


def of_all() -> dict[str, Any]:
    """Preset -> adapter -> hashes after each step."""
    return _compared(PRESETS)


def of_few() -> dict[str, Any]:
    """The same of those in which most happens."""
    return _compared({name: PRESETS[name] for name in FEW})


def on_nodes() -> dict[str, Any]:
    """The same where workers share nodes."""
    return _compared(NODES)


def _compared(presets: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with process_group():
        for name, (compression, options) in presets.items():
            given: DGCConfig = compression.config

            def make(model: nn.Module, options: Any = options) -> torch.optim.Optimizer:
                return torch.optim.SGD(model.parameters(), lr=RATE, **options)

            found[name] = {
                "Horovod": _run(
                    make, lambda m, o, c=given: DistributedOptimizer(o, m.named_parameters(), c), ddps=False
                ),
                "DDP": _run(make, lambda m, o, c=given: ddp.register(m, o, c), ddps=True),
                "plain": _run(
                    make, lambda m, o, c=given: ddp.DistributedOptimizer(o, m.named_parameters(), c), ddps=False
                ),
            }
    return found
