"""How a Keras optimizer's arithmetic is split: what enters the residual before the exchange, what is applied after.

For plain error feedback the user's optimizer takes what the exchange brings as a gradient. For SGD with momentum and
for Adam the momentum or the direction has been formed locally, before selection: what is left is the plain step
``w -= lr * mean(s)``. Keras' weight decay is decoupled for every optimizer, and stays its own.

A checkpoint's slots (velocity, moments) are taken over by the engine at the first step after they were loaded, and
emptied: by linearity nothing is lost, and nothing is applied twice. When Keras saves, they get what the rank has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation, AdamCorrection, ErrorFeedback, MomentumCorrection
from dgc_horovod.notices import ADAM_AFTER, ADAM_DIRECTIONS, refusal, tell_plain
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND
from dgc_horovod.tensorflow.wrapping.variables import Key, key_of

Left = Mapping[str, np.ndarray]  # of a variable, by part


class PlainUpdate:
    """Error feedback alone.

    Args:
        notice: text for the user, said once; "" for none.
    """

    is_split = False
    is_optimizers = True  # and not a tape's, which knows no optimizer

    def __init__(self, notice: str = "") -> None:
        self.notice = notice

    def accumulation(self, iterations: int) -> Accumulation:
        """How gradients enter the residual at the step after `iterations` others, counted from empty moments."""
        return ErrorFeedback()

    def slots(self, key: Key) -> list[Any]:
        """The optimizer's own variables for the variable `key` whose place the engine takes."""
        return []

    def take_over(self, engine: BucketEngine, i: int, slots: list[np.ndarray], rate: float) -> None:
        """Put into segment i of `engine` what stood in `slots`.

        Args:
            engine, i: engine of the variable, and index of its segment.
            slots: values of the optimizer's variables that `slots` names.
            rate: learning rate; for a sum over ranks, times their number.
        """

    def for_slots(self, engine: BucketEngine, i: int, rate: float) -> list[np.ndarray]:
        """The reverse: what this rank has, as the optimizer's slots would hold it, for a file."""
        return []

    def flush(self, optimizer: Any, left: Sequence[tuple[Any, Left]], compressed: Collection[Key]) -> list[Any]:
        """Apply what all ranks together had kept; here as one step of the user's optimizer with it as gradient.

        Args:
            optimizer: wrapped Keras optimizer.
            left: variables and what is left of each, in its shape, by part.
            compressed: keys of the variables on the sparse path.

        Returns:
            For each variable what cannot be applied, and is to be kept on every rank; or None.
        """
        gradients = [tf.cast(parts[RESIDUAL], variable.dtype) for variable, parts in left]
        optimizer._dgc_apply_as_stock(gradients, [variable for variable, _ in left])
        return [None] * len(left)


class TapeUpdate(PlainUpdate):
    """The update of gradients that go back to the script."""

    is_optimizers = False


class _SplitUpdate(PlainUpdate):
    """Variables on the sparse path are stepped by what comes back alone."""

    is_split = True

    def flush(self, optimizer: Any, left: Sequence[tuple[Any, Left]], compressed: Collection[Key]) -> list[Any]:
        rate = float(optimizer.learning_rate)
        return [self.flush_one(variable, parts, rate, key_of(variable) in compressed) for variable, parts in left]

    def flush_one(self, variable: Any, left: Left, rate: float, compressed: bool) -> np.ndarray | None:
        """Apply what is left of `variable`; returns what cannot be applied, or None."""
        raise NotImplementedError


class SGDUpdate(_SplitUpdate):
    """SGD with momentum: the engine's u carries the local momentum, without the learning rate."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def accumulation(self, iterations: int) -> Accumulation:
        return MomentumCorrection(float(self._optimizer.momentum), bool(self._optimizer.nesterov))

    def slots(self, key: Key) -> list[Any]:
        optimizer = self._optimizer
        return [optimizer.momentums[_index(optimizer, key)]] if optimizer.momentums else []

    def take_over(self, engine: BucketEngine, i: int, slots: list[np.ndarray], rate: float) -> None:
        if rate and np.any(slots[0]):  # Keras' velocity is -lr times the sum of past gradients
            _add(engine, i, engine.state.momentum(), slots[0].reshape(-1) / np.float32(-rate))

    def for_slots(self, engine: BucketEngine, i: int, rate: float) -> list[np.ndarray]:
        return [] if engine.state.u is None else [np.float32(-rate) * _part(engine, i, engine.state.u)]

    def flush_one(self, variable: Any, left: Left, rate: float, compressed: bool) -> None:
        """All of v is applied, and u joins the velocity, from which it is taken over again: nothing is lost.

        Of an uncompressed variable v is a gradient, whose momentum is still to come.
        """
        v, momentum = left[RESIDUAL], float(self._optimizer.momentum)
        later = left.get(MOMENTUM) if compressed else v
        if later is not None:
            for slot in self.slots(key_of(variable)):
                slot.assign_add(tf.cast(-rate * later, slot.dtype))
        ahead = 1 + momentum if self._optimizer.nesterov and not compressed else 1.0
        variable.assign_sub(tf.cast(rate * ahead * v, variable.dtype))


class AdamUpdate(_SplitUpdate):
    """Adam, AdamW: each rank's own Adam direction enters the residual."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(ADAM_DIRECTIONS)
        self._optimizer = optimizer

    def accumulation(self, iterations: int) -> Accumulation:
        b1, b2 = float(self._optimizer.beta_1), float(self._optimizer.beta_2)
        step = iterations + 1
        # Keras adds epsilon to the uncorrected root
        return AdamCorrection((b1, b2), float(self._optimizer.epsilon) / (1 - b2**step) ** 0.5, step)

    def slots(self, key: Key) -> list[Any]:
        i = _index(self._optimizer, key)
        return [self._optimizer._momentums[i], self._optimizer._velocities[i]]

    def take_over(self, engine: BucketEngine, i: int, slots: list[np.ndarray], rate: float) -> None:
        for ours, theirs in zip(engine.state.adam_moments(), slots, strict=True):
            if np.any(theirs):
                _add(engine, i, ours, theirs.reshape(-1))

    def for_slots(self, engine: BucketEngine, i: int, rate: float) -> list[np.ndarray]:
        return [_part(engine, i, moment) for moment in engine.state.moments or ()]

    def flush_one(self, variable: Any, left: Left, rate: float, compressed: bool) -> np.ndarray | None:
        """All of v is applied, and the mean moments go where Keras has them, from which they are taken over again.

        What coding has left of an uncompressed variable is a gradient, which is not applied alone: Adam would take
        a full step for it, however small it is.
        """
        if not compressed:
            return left[RESIDUAL]
        variable.assign_sub(tf.cast(rate * left[RESIDUAL], variable.dtype))
        if FIRST in left:
            for slot, moment in zip(self.slots(key_of(variable)), (left[FIRST], left[SECOND]), strict=True):
                slot.assign(tf.cast(moment, slot.dtype))
        return None


def _index(optimizer: Any, key: Key) -> int:
    """Where Keras keeps what belongs to a variable."""
    return optimizer._trainable_variables_indices[key[0]]


def _part(engine: BucketEngine, i: int, state: Any) -> np.ndarray:
    return engine.kernels.to_host(state[engine.bucket.segments[i].place]).copy()


def _add(engine: BucketEngine, i: int, state: Any, values: np.ndarray) -> None:
    state[engine.bucket.segments[i].place] += engine.kernels.from_host(values)


def choose_update(optimizer: Any, kind: type, config: DGCConfig | None) -> PlainUpdate:
    """The split that fits `optimizer`, of the user's class `kind`; plain error feedback where there is none.

    Raises:
        UnsupportedUse: Adam's amsgrad under momentum correction.
    """
    if config is None or not config.momentum_correction:
        return PlainUpdate(ADAM_AFTER if issubclass(kind, keras.optimizers.Adam) else "")
    if _steps_as(kind, keras.optimizers.SGD):
        return SGDUpdate(optimizer)
    if _steps_as(kind, keras.optimizers.Adam):
        if optimizer.amsgrad:
            raise UnsupportedUse(refusal("Adam's amsgrad", "amsgrad=False"))
        return AdamUpdate(optimizer)
    tell_plain(kind.__name__)
    return PlainUpdate()


def _steps_as(kind: Any, base: Any) -> bool:
    """Whether it is a `base` whose steps no subclass has changed."""
    return issubclass(kind, base) and kind.update_step is base.update_step
