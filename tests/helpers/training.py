"""A training loop that the cases on real ranks of Horovod share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.helpers.regression import INPUTS, UNROUNDED, batches, distance, fingerprint, smooth_model, target, weights

__all__ = [
    "INPUTS",
    "UNROUNDED",
    "batches",
    "distance",
    "fingerprint",
    "momentum_sgd",
    "smooth_model",
    "target",
    "train",
    "weights",
]


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum on all of `model`."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


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
