"""``horovod.tensorflow.keras`` for Keras 3: optimizer, callbacks, broadcast, loading, elastic state."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras

from dgc_horovod.config import DGCConfig
from dgc_horovod.schedule import WarmupSchedule
from dgc_horovod.tensorflow import optimizer as _optimizer
from dgc_horovod.tensorflow.broadcast import broadcast_variables
from dgc_horovod.tensorflow.keras import callbacks, elastic
from dgc_horovod.tensorflow.keras.loading import load_model
from dgc_horovod.tensorflow.state import load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.wrapping.settings import Compression

__all__ = [
    "Compression",
    "DGCConfig",
    "DistributedOptimizer",
    "WarmupSchedule",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_checkpoint",
    "load_model",
    "save_checkpoint",
]


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = hvd.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[keras.Variable]] | None = None,
    process_set: hvd.ProcessSet = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """``dgc_horovod.tensorflow.DistributedOptimizer`` with the signature of ``horovod.tensorflow.keras``."""
    return _optimizer.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
