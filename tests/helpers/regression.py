"""A smooth model and its data: regression, a shard a rank, without any framework for several ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.run import UNROUNDED, target

__all__ = ["INPUTS", "UNROUNDED", "adamw", "batches", "distance", "fingerprint", "nesterov", "sgd", "smooth_model"]
__all__ += ["step", "target", "weights"]
INPUTS = 32


def smooth_model(seed: int = 0) -> nn.Module:
    """Tanh network of 11,393 parameters: no kinks, so that rounding differences stay small."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """SGD with momentum on all of `model`."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum and decay."""
    return sgd(model, nesterov=True, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on all of `model`."""
    return torch.optim.AdamW(model.parameters(), lr=0.003)


class Dividing(torch.optim.SGD):
    """SGD that divides a gradient by its own size: where nothing of it was sent, 0 by 0."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.abs())


def batches(steps: int, rank: int, size: int = 16, seed: int = 1) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's shard of a regression task."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        x = torch.randn(size, INPUTS, generator=generator)
        yield x, target(x)


def step(
    model: Any,
    optimizer: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    scaler: Any = None,
    between: Callable[[], Any] | None = None,
) -> float:
    """One step of training; returns the loss.

    Args:
        model, optimizer: of it.
        x, y: a batch.
        scaler: of the loss, where a script has one.
        between: what a script does between backward() and step(); but with DDP it calls synchronize() before.
    """
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    synchronizes = between is not None and not isinstance(model, DistributedDataParallel)
    if synchronizes:
        optimizer.synchronize()
    if between is not None:
        between()
    with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return float(loss)


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fingerprint(model: nn.Module) -> str:
    """Hash of the exact bits of all parameters."""
    return hashlib.sha256(weights(model).numpy().tobytes()).hexdigest()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """``|a - b| / |a|``."""
    return float((a - b).norm() / a.norm())


class SharedGradients(nn.Module):
    """Views of two parameters are added, so autograd gives both gradients one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(64, 32)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(32)) for _ in range(2))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.a.unsqueeze(0) + self.b.unsqueeze(0)
        return torch.tanh(x @ both[0].T + 0.0) @ both[0] + (self.c.view(1, 32) + self.d.view(1, 32))
