"""Training of a smooth model over torch.distributed, which tests on ranks without Horovod share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import DistributedOptimizer, register
from tests.helpers.regression import batches, sgd, smooth_model, step

__all__ = ["made", "made_plain", "one_batch", "sgd", "step", "train"]


def made(
    compression: Any, make: Callable[[nn.Module], Any] = sgd, inner: nn.Module | None = None, **options: Any
) -> tuple[DistributedDataParallel, Any]:
    """A model in DDP, with `options` of that, and its optimizer; compression None: which is not registered."""
    model = DistributedDataParallel(smooth_model() if inner is None else inner, **options)
    optimizer = make(model)
    return model, optimizer if compression is None else register(model, optimizer, compression)


def made_plain(
    compression: Any, make: Callable[[nn.Module], Any] = sgd, inner: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, Any]:
    """As `made`, without DDP; with `options` of the optimizer."""
    model = smooth_model() if inner is None else inner
    return model, DistributedOptimizer(make(model), model.named_parameters(), compression, **options)


def one_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's first."""
    return next(iter(batches(1, dist.get_rank())))


def train(model: Any, optimizer: Any, steps: int = 12, scaler: Any = None) -> None:
    """So many steps, from this rank's first batch on."""
    for x, y in batches(steps, dist.get_rank()):
        step(model, optimizer, x, y, scaler)
