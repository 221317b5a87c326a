"""The PyTorch adapter: ``DistributedOptimizer`` and ``Compression``, for unmodified Horovod.

Horovod is imported by the first name that needs it; `gradients` and `updates` do not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("dgc_horovod.torch needs PyTorch: pip install torch, or dgc_horovod[torch]") from error

from dgc_horovod.config import DGCConfig, WarmupSchedule

if TYPE_CHECKING:
    from dgc_horovod.torch import elastic
    from dgc_horovod.torch.adapter import (
        Compression,
        DistributedOptimizer,
        join,
        load_checkpoint,
        node_process_sets,
        save_checkpoint,
    )

__all__ = [
    "Compression",
    "DGCConfig",
    "DistributedOptimizer",
    "WarmupSchedule",
    "elastic",
    "join",
    "load_checkpoint",
    "node_process_sets",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dgc_horovod.torch import adapter

    return getattr(adapter, name)
