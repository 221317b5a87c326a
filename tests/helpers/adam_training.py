"""AdamW over a second moment that all ranks share, which tests of its steps and of its state have in common."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers.training import smooth_model

DENSE, BETAS = 30, (0.9, 0.95)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As stock Horovod has it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.01)


def wrapped(model: nn.Module, dense: int = 0, op: Any = hvd.Average, **settings: Any) -> Any:
    """The same, compressed, after so many dense steps."""
    warmup = WarmupSchedule(steps=dense, first_density=1.0, factor=1e-3) if dense else None
    config = Compression.dgc(**{"density": 0.05, "warmup": warmup, **settings})
    return DistributedOptimizer(adamw(model), model.named_parameters(), config, op=op)


def made(dense: int = 0, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    """The smooth model and its optimizer."""
    model = smooth_model(seed)
    return model, wrapped(model, dense, **settings)


def known(optimizer: Any) -> str:
    """The bits of what is known of second moments."""
    return session(optimizer).exchange.second.packed().tobytes().hex()
