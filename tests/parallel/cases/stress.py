"""Thousands of steps with tensors of odd sizes, gradients in any order, ranks that dawdle, densities that change."""

from __future__ import annotations

import os
import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import psutil
import torch

from dgc_horovod import WarmupSchedule
from dgc_horovod.torch import Compression, DistributedOptimizer

TENSORS, CHECK_EVERY = 24, 20
_PAUSE = 0.004  # seconds at most, at one step of twenty


def long_run() -> dict[str, Any]:
    """``STRESS_STEPS`` steps; every `CHECK_EVERY` the ranks compare weights, and their memory is looked at."""
    hvd.init()
    steps = int(os.environ["STRESS_STEPS"])
    common, own = np.random.default_rng(0), np.random.default_rng(1 + hvd.rank())
    draw = torch.Generator().manual_seed(hvd.rank())
    parameters = _parameters(common)
    sgd = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    compression = Compression.dgc(
        0.004, min_numel=64, bucket_bytes=100_000, clip_norm=50.0, check_every=CHECK_EVERY,
        warmup=WarmupSchedule(steps=3 * steps // 4, factor=0.5),
    )  # fmt: skip
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    optimizer = DistributedOptimizer(sgd, named, compression)
    memory, slowest = [], 0.0
    for step in range(steps):
        start = time.monotonic()
        optimizer.zero_grad()
        for part in np.array_split(own.permutation(TENSORS), 4):
            if own.random() < 0.05:
                time.sleep(own.uniform(0, _PAUSE))
            noise = [torch.randn(parameters[i].shape, generator=draw) for i in part]
            sum(((parameters[i] * g).sum() for i, g in zip(part, noise, strict=True)), torch.zeros(())).backward()
        optimizer.step()
        slowest = max(slowest, time.monotonic() - start)
        if step % CHECK_EVERY == 0:
            memory.append(psutil.Process().memory_info().rss / 2**20)
    stats = optimizer.compression_stats()
    weights = torch.cat([p.detach().flatten() for p in parameters])
    return {
        "weights": [weights.double().sum().item(), weights.double().square().sum().item()],
        "finite": bool(torch.isfinite(weights).all()), "steps": stats["steps"], "slowest": slowest, "memory": memory,
        "density": [bucket["density"] for bucket in stats["buckets"]], "age": [b["age"] for b in stats["buckets"]],
    }  # fmt: skip


def _parameters(common: np.random.Generator) -> list[torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(1,), (1, 1), (63,), (64, 1), (8, 8)]
    while len(shapes) < TENSORS:
        rows, columns = (int(n) for n in common.integers(1, 160, 2))
        shapes.append((rows, columns) if common.random() < 0.8 else (rows * columns,))
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
