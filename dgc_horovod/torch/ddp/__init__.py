"""The PyTorch adapter for torch.distributed, without Horovod: ``register`` for DDP, and ``DistributedOptimizer``."""

from __future__ import annotations

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("dgc_horovod.torch.ddp needs torch.distributed, which this build of PyTorch has not")

from dgc_horovod.config import DGCConfig, WarmupSchedule
from dgc_horovod.torch.ddp.optimizer import (
    Compression,
    DistributedOptimizer,
    load_checkpoint,
    load_residuals,
    register,
    save_checkpoint,
    save_residuals,
)

__all__ = [
    "Compression",
    "DGCConfig",
    "DistributedOptimizer",
    "WarmupSchedule",
    "load_checkpoint",
    "load_residuals",
    "register",
    "save_checkpoint",
    "save_residuals",
]
