"""A smooth model and a training loop that the cases on real ranks share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

# Compression fields with which nothing is rounded: what stock Horovod is compared with.
UNROUNDED = {"values": "fp32", "dense_values": "fp32"}
INPUTS = 32


def smooth_model(seed: int = 0) -> nn.Module:
    """Tanh network of 11,393 parameters: no kinks, so that rounding differences stay small."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum on all of `model`."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def target(x: torch.Tensor) -> torch.Tensor:
    """What is to be learnt of `x`."""
    return x[:, :4].sum(1, keepdim=True) + 0.5 * x[:, 4:5] ** 2


def batches(steps: int, rank: int, size: int = 16, seed: int = 1) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's shard of a regression task."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        x = torch.randn(size, INPUTS, generator=generator)
        yield x, target(x)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int = 20,
    passes: int = 1,
    after_step: Callable[[int], None] = lambda step: None,
    before_backward: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train and return the losses."""
    data = iter(batches(steps * passes, hvd.rank()))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        before_backward(step)
        for _ in range(passes):
            x, y = next(data)
            loss = F.mse_loss(model(x), y) / passes
            loss.backward()
        optimizer.step()
        after_step(step)
        losses.append(loss.item() * passes)
    return losses


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fingerprint(model: nn.Module) -> str:
    """Hash of the exact bits of all parameters."""
    return hashlib.sha256(weights(model).numpy().tobytes()).hexdigest()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """``|a - b| / |a|``."""
    return float((a - b).norm() / a.norm())
