"""``load_model``: a saved model, ready to be trained further on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from dgc_horovod.files import AnyPath
from dgc_horovod.tensorflow.optimizer import DistributedOptimizer, is_distributed, set_right
from dgc_horovod.tensorflow.wrapping.settings import Compression


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
    if getattr(model, "optimizer", None) is not None and not is_distributed(model.optimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **arguments)
        set_right(model)
    return model
