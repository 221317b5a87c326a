"""A long run: replicas stay identical, memory stays flat, nothing hangs."""

from __future__ import annotations

import statistics
import time

import horovod.torch as hvd
import numpy as np
import psutil
import pytest
import torch

from dgc_horovod import WarmupSchedule
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(timeout=1600)]
_TENSORS, _CHECK_EVERY = 24, 20
_PAUSE = 0.004  # seconds at most, at one step of twenty


def _parameters(common: np.random.Generator) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(1,), (1, 1), (63,), (64, 1), (8, 8)]
    while len(shapes) < _TENSORS:
        rows, columns = (int(n) for n in common.integers(1, 160, 2))
        shapes.append((rows, columns) if common.random() < 0.8 else (rows * columns,))
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]


def _backward(parameters: list[torch.Tensor], own: np.random.Generator, draw: torch.Generator) -> None:
    """Gradients of noise, in any order, with pauses."""
    for part in np.array_split(own.permutation(_TENSORS), 4):
        if own.random() < 0.05:
            time.sleep(own.uniform(0, _PAUSE))
        noise = [torch.randn(parameters[i].shape, generator=draw) for i in part]
        sum(((parameters[i] * g).sum() for i, g in zip(part, noise, strict=True)), torch.zeros(())).backward()


@pytest.mark.timeout(1700)
@pytest.mark.parametrize(
    ("controller", "workers", "steps"),
    [
        ("gloo", 2, 400),
        pytest.param("gloo", 4, 10_000, marks=pytest.mark.slow),
        pytest.param("mpi", 4, 10_000, marks=[pytest.mark.slow, pytest.mark.mpi]),
    ],
)
def test_a_long_run(controller, workers, steps):
    """Tensors of odd sizes, gradients in any order, ranks that dawdle, densities that change."""
    own, draw = np.random.default_rng(1 + hvd.rank()), torch.Generator().manual_seed(hvd.rank())
    parameters = _parameters(np.random.default_rng(0))
    sgd = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    compression = Compression.dgc(
        0.004, min_numel=64, bucket_bytes=100_000, clip_norm=50.0, check_every=_CHECK_EVERY,
        warmup=WarmupSchedule(steps=3 * steps // 4, factor=0.5),
    )  # fmt: skip
    optimizer = DistributedOptimizer(sgd, [(f"p{i}", p) for i, p in enumerate(parameters)], compression)
    memory, slowest = [], 0.0
    for step in range(steps):
        start = time.monotonic()
        optimizer.zero_grad()
        _backward(parameters, own, draw)
        optimizer.step()
        slowest = max(slowest, time.monotonic() - start)
        if step % _CHECK_EVERY == 0:
            memory.append(psutil.Process().memory_info().rss / 2**20)

    settled = memory[min(500, steps // 2) // _CHECK_EVERY :]
    third = len(settled) // 3
    growth = statistics.median(settled[-third:]) - statistics.median(settled[:third])
    assert growth < 4, f"{growth:.1f} MiB more at the end than in the middle"
    stats = optimizer.compression_stats()
    assert stats["steps"] == steps and slowest < 60
    assert sum(bucket["density"] < 0.02 for bucket in stats["buckets"]) >= 4
    assert 0 < max(bucket["age"] for bucket in stats["buckets"]) <= steps
    weights = torch.cat([p.detach().flatten() for p in parameters])
    assert torch.isfinite(weights).all()
    same_on_ranks(weights.double().sum().item(), weights.double().square().sum().item())
