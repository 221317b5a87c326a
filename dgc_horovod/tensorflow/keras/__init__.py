"""``horovod.tensorflow.keras`` for Keras 3: optimizer, callbacks, broadcast, loading, elastic state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras

from dgc_horovod.config import DGCConfig, WarmupSchedule
from dgc_horovod.files import AnyPath
from dgc_horovod.tensorflow import optimizer as _optimizer
from dgc_horovod.tensorflow.keras import callbacks, elastic
from dgc_horovod.tensorflow.settings import Compression
from dgc_horovod.tensorflow.state import load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.variables import broadcast_variables

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
    return _optimizer.DistributedOptimizer(**locals())  # the same names in another order


def load_model(
    filepath: AnyPath,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: object = Compression.none,
    legacy_opts: bool = False,
    **arguments: Any,
) -> Any:
    """Load a model that Keras has saved, and make its optimizer distributed.

    Weights and the optimizer's variables are those of the file; u and v, which are each rank's own and not in the file,
    start from zero, and the momentum of the file is taken over.

    Args:
        filepath: path of the saved model.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: objects by name, see ``keras.models.load_model``.
        compression: compression of the optimizer, see ``DistributedOptimizer``.
        legacy_opts: without effect, for compatibility; Keras 3 has no legacy optimizers.
        arguments: other arguments of ``DistributedOptimizer``: op, backward_passes_per_step, ...; no file has them.

    Returns:
        The model, compiled if it was saved so.
    """
    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None and not _optimizer.is_distributed(model.optimizer):
        model.optimizer = _optimizer.DistributedOptimizer(model.optimizer, compression=compression, **arguments)
        _optimizer.set_right(model)
    return model
