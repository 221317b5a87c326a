"""Models, optimizers and a loop of training that the cases on real ranks of Horovod share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import DistributedOptimizer
from tests.helpers import regression
from tests.helpers.regression import INPUTS, UNROUNDED, batches, distance, fingerprint, smooth_model, target, weights

__all__ = ["INPUTS", "UNROUNDED", "batches", "distance", "fingerprint", "first_loss", "made", "momentum_sgd"]
__all__ += ["smooth_model", "target", "train", "weights"]


def momentum_sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """SGD with momentum on all of `model`, faster than `regression.sgd`."""
    return regression.sgd(model, **{"lr": 0.1, **options})


def made(
    compression: Any, make: Callable[[nn.Module], Any] = momentum_sgd, inner: nn.Module | None = None, **more: Any
) -> tuple[Any, Any]:
    """A model, or `inner`, and its distributed optimizer; compression None: of stock Horovod."""
    model = smooth_model() if inner is None else inner
    if compression is None:
        return model, hvd.DistributedOptimizer(make(model), model.named_parameters(), **more)
    return model, DistributedOptimizer(make(model), model.named_parameters(), compression, **more)


def first_loss(model: nn.Module) -> torch.Tensor:
    """Of this rank's first batch."""
    x, y = next(iter(batches(1, hvd.rank())))
    return F.mse_loss(model(x), y)


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
