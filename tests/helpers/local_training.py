"""Local steps of PyTorch on Horovod, which tests of what is around them share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import smooth_model

H = 5


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The inner optimizer, where no other is said."""
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **fields: Any) -> Any:
    """An optimizer with local steps, 10% in 2 bits."""
    compression = Compression.local(**{"steps": H, "density": 0.1, "min_numel": 64, **fields})
    return DistributedOptimizer(optimizer or adamw(model), model.named_parameters(), compression)


def made(**fields: Any) -> tuple[Any, Any]:
    """The smooth model and its optimizer."""
    model = smooth_model()
    return model, wrapped(model, **fields)
