"""What stays with each rank under local steps: the inner optimizer and its slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, Arrays
from dgc_horovod.tensorflow.updates.base import PlainUpdate, index_of
from dgc_horovod.tensorflow.wrapping.variables import Key, native


class LocalUpdate(PlainUpdate):
    """The inner optimizer takes its own gradients; what is exchanged are changes of weights.

    Args:
        optimizer: wrapped Keras optimizer; the slots of SGD, Adam and AdamW are kept of every rank, of others those of
            the first.
        rate: outer learning rate, > 0.
    """

    flush_is_step = False

    def __init__(self, optimizer: Any, rate: float) -> None:
        super().__init__()
        self._optimizer, self._rate = optimizer, rate

    def own(self, key: Key) -> Arrays:
        own = {part: native(slot).numpy().astype(np.float32).reshape(-1) for part, slot in self._slots(key).items()}
        return own if all(np.isfinite(x).all() for x in own.values()) else {}  # no file takes others

    def without_own(self, key: Key, arrays: Arrays) -> Arrays:
        slots = self._slots(key)
        for part, slot in slots.items():
            if part in arrays and arrays[part].size != math.prod(slot.shape):
                raise CheckpointError(
                    f"the optimizer's slot {slot.name!r} has {arrays[part].size} elements in the record, and "
                    f"{math.prod(slot.shape)} here; they must be of the same model"
                )
        return {part: x for part, x in arrays.items() if part not in slots}

    def take_own(self, key: Key, arrays: Arrays) -> None:
        with tf.init_scope():  # the first step may be under construction
            for part, slot in self._slots(key).items():
                if part in arrays:
                    native(slot).assign(tf.cast(arrays[part].reshape(slot.shape), native(slot).dtype))

    def _slots(self, key: Key) -> dict[str, Any]:
        """The slots of the variable `key`, by part of a rank's record."""
        optimizer = self._optimizer
        if isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentums:
            return {MOMENTUM: optimizer.momentums[index_of(optimizer, key)]}
        if isinstance(optimizer, keras.optimizers.Adam):
            i = index_of(optimizer, key)
            return {FIRST: optimizer._momentums[i], SECOND: optimizer._velocities[i]}
        return {}

    def flush(self, optimizer: Any, left: Sequence[tuple[Any, Any]], compressed: Any) -> list[Any]:
        """Apply what all ranks together had kept: nothing of it is left."""
        for variable, parts in left:
            if RESIDUAL in parts:
                native(variable).assign_sub(tf.cast(self._rate * parts[RESIDUAL], native(variable).dtype))
        return [None] * len(left)
