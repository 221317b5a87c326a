"""Runs under ``Compression.auto`` on real ranks, in an exchange that a test chooses, beside stock Horovod's."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
from torch import nn

from dgc_horovod.planning.trial import DENSE
from dgc_horovod.testing.torch import take
from dgc_horovod.torch import Compression
from tests.helpers import interrupted
from tests.helpers.interrupted import nesterov
from tests.helpers.run import STEPS
from tests.helpers.training import batches, smooth_model


def made(make: Any = nesterov, mode: str | None = DENSE, **fields: Any) -> tuple[nn.Module, Any]:
    """A model and its optimizer, whose exchange stays what it is until it is told; mode None: it chooses."""
    model, optimizer = interrupted.made(Compression.auto(**{"density": 0.05, "min_numel": 16, **fields}), make)
    if mode is not None:
        take(optimizer, mode)
    return model, optimizer


def train_clipped(model: nn.Module, optimizer: Any, clip: float | None, data: Any, scale: float = 1.0) -> None:
    """Steps of a script that clips averages by itself."""
    for x, y in data:
        optimizer.zero_grad()
        (scale * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.synchronize()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        with optimizer.skip_synchronize():
            optimizer.step()


def stock(make: Any, clip: float | None = None) -> nn.Module:
    """What stock Horovod makes of `STEPS` steps."""
    model = smooth_model()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters())
    train_clipped(model, optimizer, clip, batches(STEPS, hvd.rank()))
    return model
