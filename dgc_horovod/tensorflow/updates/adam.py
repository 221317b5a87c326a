"""How the arithmetic of Keras' Adam and AdamW is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.second_moment import bounded
from dgc_horovod.kernels.contract import Accumulation, AdamCorrection, ErrorFeedback
from dgc_horovod.notices import ADAM_DIRECTIONS
from dgc_horovod.state.residual_state import FIRST, RESIDUAL, SECOND
from dgc_horovod.tensorflow.updates.base import Left, SplitUpdate, add_to, index_of, kept_of, part_of
from dgc_horovod.tensorflow.wrapping.variables import Key, native


class AdamUpdate(SplitUpdate):
    """Adam, AdamW: each rank's own Adam direction enters the residual."""

    keeps_second = True
    parts: tuple[str, ...] = (RESIDUAL, FIRST, SECOND)

    def __init__(self, optimizer: Any) -> None:
        super().__init__(ADAM_DIRECTIONS)
        self._optimizer = optimizer

    def accumulation(self, iterations: int, dense: bool) -> Accumulation:
        b1, b2 = float(self._optimizer.beta_1), float(self._optimizer.beta_2)
        step = iterations + 1
        # Keras adds epsilon to the uncorrected root
        return AdamCorrection((b1, b2), float(self._optimizer.epsilon) / (1 - b2**step) ** 0.5, step)

    def slots(self, key: Key) -> list[Any]:
        i = index_of(self._optimizer, key)
        return [self._optimizer._momentums[i], self._optimizer._velocities[i]]

    def take_over(self, engine: BucketEngine, i: int, slots: list[np.ndarray], rate: float) -> None:
        for ours, theirs in zip(engine.state.adam_moments(), slots, strict=True):
            if np.any(theirs):
                add_to(engine, i, ours, theirs)

    def for_slots(self, engine: BucketEngine, i: int, rate: float, slots: Sequence[Any]) -> list[np.ndarray]:
        return [part_of(engine, i, moment) for moment in engine.state.moments or ()]

    def hand_back(self, key: Key, variable: Any, left: Left, rate: Any, compressed: bool) -> Any:
        """All of v is applied, and the mean moments go where Keras has them, from which they are taken over again.

        What coding has left of an uncompressed variable is a gradient, which is not applied alone: Adam would take
        a full step for it, however small it is.
        """
        if not compressed:
            return left[RESIDUAL]
        variable.assign_sub(tf.cast(rate * left[RESIDUAL], variable.dtype))
        if FIRST in left:
            begun = tf.reduce_any(tf.not_equal(left[SECOND], 0.0))  # else there was no step, and the slots have all
            for slot, moment in zip(map(native, self.slots(key)), (left[FIRST], left[SECOND]), strict=True):
                slot.assign(tf.where(begun, tf.cast(moment, slot.dtype), slot))
        return None


class FrozenAdamUpdate(AdamUpdate):
    """Adam, AdamW with a second moment that is learnt in dense steps, the same on every rank, and then stays.

    See its namesake in ``torch.updates``. The optimizer's velocity stays in its slot, the same on every rank, and is
    divided by its ``1-b2**t`` when the dense steps are over; the engine's is made from it. The momentum is then empty,
    by which the two forms can be told apart wherever slots come from. Files have the form of the stock optimizer.
    """

    keeps_second, learns_second = False, True
    parts = (RESIDUAL, FIRST)

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.notices, self.share = (
            list[str](),
            1,
        )  # of a sum over ranks, their number: what a first moment is divided by

    @property
    def window(self) -> float:
        """``1/(1-b2)``: of so many steps the second moment is an average."""
        return 1 / (1 - float(self._optimizer.beta_2))

    def accumulation(self, iterations: int, dense: bool) -> Accumulation:
        if dense:
            return ErrorFeedback()
        b1, b2 = float(self._optimizer.beta_1), float(self._optimizer.beta_2)
        return AdamCorrection((b1, b2), float(self._optimizer.epsilon), iterations + 1, frozen=True)

    def correction(self, momentum: np.ndarray, iterations: int) -> np.float32:
        """What the velocity of a variable is multiplied by, which has made so many steps; 1 where that was done."""
        return np.float32(1 / self._bias(iterations) if np.any(momentum) else 1)

    def _bias(self, iterations: int) -> float:
        return 1 - float(self._optimizer.beta_2) ** max(1, iterations)

    def take_second(self, engine: BucketEngine, i: int, velocity: np.ndarray) -> bool:
        """Let the second moment of segment i be what all ranks have; returns whether they have learnt it.

        Args:
            engine, i: engine of the variable, and index of its segment.
            velocity: second moment of the whole variable, flat float32, divided by its ``1-b2**t``.
        """
        second, place = bounded(velocity), engine.bucket.segments[i].place
        engine.state.adam_moments()[1][place] = engine.kernels.from_host(kept_of(engine, i, second))
        engine.state.shared.add(i)
        return not np.isinf(second).all()

    def take_first(self, engine: BucketEngine, i: int, momentum: np.ndarray) -> None:
        """Take over a first moment of dense steps; the residual, so far of gradients, becomes one of directions.

        Args:
            engine, i: engine of the variable, and index of its segment.
            momentum: this rank's part of the first moment of the whole variable, flat float32.
        """
        place = engine.bucket.segments[i].place
        root = np.sqrt(engine.kernels.to_host(engine.state.adam_moments()[1][place]))
        v = engine.kernels.to_host(engine.state.v[place])
        engine.state.v[place] = engine.kernels.from_host(v / (root + np.float32(self._optimizer.epsilon)))
        add_to(engine, i, engine.state.adam_moments()[0], momentum)
        engine.state.begun.add(i)

    def for_slots(self, engine: BucketEngine, i: int, rate: float, slots: Sequence[Any]) -> list[np.ndarray]:
        if i not in engine.state.begun:  # dense steps: the slots have everything
            return []
        first = np.float32(self.share) * part_of(engine, i, engine.state.adam_moments()[0])
        velocity = slots[1].numpy()
        bias = self._bias(int(self._optimizer.iterations))
        return [first, velocity * np.float32(bias)] if np.any(first) else [first]

    def hand_back(self, key: Key, variable: Any, left: Left, rate: Any, compressed: bool) -> Any:
        """All of v is applied, and the mean first moment goes where Keras has it.

        Without a first moment there were dense steps alone, and v is what coding has left of a gradient.
        """
        if not compressed or FIRST not in left:
            return left[RESIDUAL]
        variable.assign_sub(tf.cast(rate * left[RESIDUAL], variable.dtype))
        momentum, velocity = map(native, self.slots(key))
        begun = tf.reduce_any(tf.not_equal(left[FIRST], 0.0))  # else the velocity is divided already, and stays so
        steps = tf.cast(tf.maximum(native(self._optimizer.iterations), 1), tf.float64)
        bias = tf.where(begun, 1 - tf.pow(tf.constant(float(self._optimizer.beta_2), tf.float64), steps), 1.0)
        momentum.assign(tf.where(begun, tf.cast(self.share * left[FIRST], momentum.dtype), momentum))
        velocity.assign(velocity * tf.cast(bias, velocity.dtype))
        return None
