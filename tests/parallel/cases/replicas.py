"""Replicas stay bit-identical, whatever the rule, scope, codec, or order in which gradients arrive."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers.training import INPUTS, batches, fingerprint, smooth_model, train

COMPRESSIONS = {
    "dgc": lambda: Compression.dgc(0.01),
    "dgc tensor bf16": lambda: Compression.dgc(0.01, scope="tensor", values="bf16"),
    "dgc fp16 clip warm-up": lambda: Compression.dgc(
        0.01, values="fp16", clip_norm=1.0, warmup=WarmupSchedule(steps=30), bucket_bytes=8192
    ),
    "topk": lambda: Compression.topk(0.01, compress_1d=True, min_numel=1),
    "sampled": lambda: Compression.sampled(0.01),
    "gaussian": lambda: Compression.gaussian(0.01),
    "gaussian dgc": lambda: Compression.dgc(0.01, rule="gaussian"),
    "random": lambda: Compression.random(0.01),
    "threshold": lambda: Compression.threshold(0.1, max_density=0.2),
}


def every_rule() -> dict[str, Any]:
    """50 steps of every rule; the ranks' weights, and how much was selected."""
    hvd.init()
    results = {}
    for name, compression in COMPRESSIONS.items():
        model = smooth_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=name == "topk")
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression())
        losses = train(model, optimizer, steps=50)
        results[name] = {
            "fingerprint": fingerprint(model),
            "losses": [sum(losses[:5]) / 5, sum(losses[-5:]) / 5],
            "stats": optimizer.compression_stats(),
        }
    return results


def large_bucket() -> dict[str, Any]:
    """A bucket of 160,000 elements, where exact selection works on candidates and `sampled` takes a sample."""
    hvd.init()
    results = {}
    for rule in ("exact", "sampled", "gaussian"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(INPUTS, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.005, rule=rule))
        train(model, optimizer, steps=12)
        stats = optimizer.compression_stats()
        results[rule] = {"fingerprint": fingerprint(model), "density": stats["selected"] / stats["elements"]}
    return results


class _TwoBranches(nn.Module):
    """Backward reaches the two branches in an order that depends on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(INPUTS, 64), nn.Linear(INPUTS, 64)
        self.head = nn.Linear(64, 1)
        self.left_first = rank % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left_first:
            a = torch.tanh(self.left(x))
            hidden = a + torch.tanh(self.right(x))
        else:
            b = torch.tanh(self.right(x))
            hidden = b + torch.tanh(self.left(x))
        return self.head(hidden)


def arrival_order() -> dict[str, Any]:
    """Buckets of one tensor each, completed in different orders on even and odd ranks."""
    hvd.init()
    model = _TwoBranches(hvd.rank())
    order: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.01, bucket_bytes=64, min_numel=1))
    train(model, optimizer, steps=30)
    return {"fingerprint": fingerprint(model), "order": order[: len(list(model.parameters()))]}


def unused_parameters() -> dict[str, Any]:
    """A branch that only odd ranks use, and only in odd steps."""
    hvd.init()
    model = _TwoBranches(hvd.rank())
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.01, bucket_bytes=64))
    before = model.right.weight.detach().clone()
    for step, (x, y) in enumerate(batches(30, hvd.rank())):
        optimizer.zero_grad()
        hidden = torch.tanh(model.left(x))
        if hvd.rank() % 2 and step % 2:
            hidden = hidden + torch.tanh(model.right(x))
        F.mse_loss(model.head(hidden), y).backward()
        optimizer.step()
    return {"fingerprint": fingerprint(model), "moved": float((model.right.weight - before).norm())}


def two_optimizers() -> dict[str, Any]:
    """Two models of the same parameter names, each with its own optimizer, in flight at once."""
    hvd.init()
    # packets only: a ring adds in an order that depends on what Horovod fuses
    compression = Compression.dgc(0.01, compress_1d=True, min_numel=1)
    models = [smooth_model(seed) for seed in (0, 1)]
    optimizers = [
        DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9), m.named_parameters(), compression)
        for m in models
    ]
    for x, y in batches(20, hvd.rank()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (F.mse_loss(models[0](x), y) + F.mse_loss(models[1](x), y)).backward()
        for optimizer in reversed(optimizers) if hvd.rank() % 2 else optimizers:
            optimizer.step()
    alone = smooth_model(1)
    sgd = torch.optim.SGD(alone.parameters(), lr=0.02, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, alone.named_parameters(), compression)
    train(alone, optimizer, steps=20)
    return {"fingerprint": [fingerprint(m) for m in models], "alone": fingerprint(alone)}
