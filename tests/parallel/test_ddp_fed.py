"""Fed the same gradients, both PyTorch adapters keep, send and apply the same bits, one rank's infinity included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, ddp, node_process_sets
from tests.helpers.fed import DENSITY, LOOKED_AT, MIN_NUMEL, RATE, SETTINGS, SHAPES, STEPS, gradients, looked_at
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import fingerprint

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2, "torch")]
BASE = {"density": DENSITY, "min_numel": MIN_NUMEL}
PRESETS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (Compression.dgc(**{**BASE, **fields}), options) for name, (fields, options) in SETTINGS.items()},
    "topk": (Compression.topk(**BASE), {"momentum": 0.9}),
    "sampled": (Compression.sampled(**BASE), {"momentum": 0.9}),
    "gaussian": (Compression.gaussian(**BASE), {}),
    "sharded": (Compression.dgc(**BASE, exchange="sharded", bucket_bytes=9000), {"momentum": 0.9, "nesterov": True}),
    "warm-up": (Compression.dgc(**BASE, warmup=ddp.WarmupSchedule(steps=4)), {"momentum": 0.9, "weight_decay": 0.01}),
    "fp32 beside": (Compression.dgc(**BASE, dense_values="fp32"), {"momentum": 0.9}),
    "fp16 beside": (Compression.dgc(**BASE, dense_values="fp16"), {"momentum": 0.9}),
}
FEW = ("nesterov, clipped", "gaussian, 4 bit, small buckets", "sharded", "warm-up")
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
def _process_group(folder: Path) -> Iterator[None]:
    """torch.distributed between Horovod's ranks."""
    hvd.init()
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=hvd.rank(), world_size=hvd.size())
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def fed_to_horovod() -> dict[str, list[dict[str, str]]]:
    """On a rank: setting -> what `looked_at` says after each step of Horovod's adapter."""
    found = {name: _run(PRESETS[name][1], _by_horovod(PRESETS[name][0].config), in_ddp=False) for name in SETTINGS}
    return {name: [{what: row[what] for what in LOOKED_AT} for row in rows] for name, rows in found.items()}


def _by_horovod(config: Any) -> Callable[[nn.Module, Any], Any]:
    return lambda model, optimizer: DistributedOptimizer(optimizer, model.named_parameters(), config)


def _run(options: dict[str, Any], wrap: Callable[[nn.Module, Any], Any], in_ddp: bool) -> Any:
    """What is kept and sent after each step."""
    model: Any = DistributedDataParallel(_Fed(), bucket_cap_mb=0.01) if in_ddp else _Fed()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=RATE, **options))
    rows = []
    for step in gradients(hvd.rank()):
        optimizer.zero_grad()
        model({key: torch.from_numpy(x) for key, x in step.items()}).backward()
        optimizer.step()
        buckets = session(optimizer).exchange
        rows.append({**looked_at(buckets), "weights": fingerprint(model), "node size": buckets.topology.node_size})
    return rows


def _compare(compression: Any, options: dict[str, Any], in_any_order: bool = False) -> Any:
    """The rows of Horovod's adapter, which are those of the others."""
    config = compression.config
    ours = _run(options, _by_horovod(config), in_ddp=False)
    in_ddp = _run(options, lambda m, o: ddp.register(m, o, config), in_ddp=True)
    plain = _run(options, lambda m, o: ddp.DistributedOptimizer(o, m.named_parameters(), config), in_ddp=False)
    assert len(ours) == STEPS and len({row["weights"] for row in in_ddp}) > 2, "nothing was trained"
    assert in_any_order or ours == in_ddp == plain
    same_on_ranks([[row["weights"] for row in rows] for rows in (ours, in_ddp, plain)])
    return ours


@pytest.mark.parametrize(
    ("workers", "presets"), [(2, FEW), *(pytest.param(n, tuple(PRESETS), marks=pytest.mark.slow) for n in (2, 3, 4))]
)
def test_bits_are_those_of_the_horovod_adapter(workers, presets, tmp_path):
    with _process_group(tmp_path):
        for name in presets:  # two terms have one sum, of more it depends on the library's order
            _compare(*PRESETS[name], in_any_order=name in SUMMED and workers > 2)


@pytest.mark.slow
@pytest.mark.on_ranks(4, "torch", fresh=True)
def test_on_nodes_bits_are_those_of_the_horovod_adapter(tmp_path):
    hvd.init(process_sets=node_process_sets(2))
    with _process_group(tmp_path):
        for compression, options in NODES.values():
            assert _compare(compression, options)[-1]["node size"] == 2
