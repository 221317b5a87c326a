"""How the arithmetic of Keras' Adam and AdamW is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.notices import ADAM_DIRECTIONS
from dgc_horovod.state.residual_state import RESIDUAL, SECOND
from dgc_horovod.tensorflow.updates.base import Left, SplitUpdate, index_of
from dgc_horovod.tensorflow.wrapping.variables import Key, native


class AdamUpdate(SplitUpdate):
    """Adam, AdamW: gradients enter the residual over the root of a second moment that all ranks share.

    See its namesake in ``torch.updates``. What the optimizer's slots hold is taken over when compression begins: its
    velocity, divided by ``1-b2**t``, is what the second moment begins with.
    """

    dense_is_stock = True
    parts = (RESIDUAL, SECOND)

    def __init__(self, optimizer: Any) -> None:
        super().__init__(ADAM_DIRECTIONS)
        self._optimizer = optimizer

    def accumulation(self, buckets: OptimizerExchange, name: str) -> Accumulation:
        return buckets.adam.feed(name, float(self._optimizer.beta_2), float(self._optimizer.epsilon))

    def slots(self, key: Key) -> list[Any]:
        i = index_of(self._optimizer, key)
        return [self._optimizer._momentums[i], self._optimizer._velocities[i]]

    def take_over(
        self, buckets: OptimizerExchange, name: str, slots: list[np.ndarray], rate: float, iterations: int
    ) -> None:
        momentum, velocity = slots
        if buckets.second[name].known or not velocity.any():
            return
        b1, b2, steps = float(self._optimizer.beta_1), float(self._optimizer.beta_2), max(1, iterations)
        share = 1 if buckets.averages else buckets.workers  # each rank has its part of a sum
        rest, square = momentum * np.float32(b1 / (1 - b1) / share), velocity / np.float32(1 - b2**steps)
        buckets.adam.take(name, square, rest, steps, b2, float(self._optimizer.epsilon))

    def for_slots(self, buckets: OptimizerExchange, name: str, rate: float) -> list[np.ndarray]:
        if not buckets.second[name].known:  # the slots have everything
            return []
        square = buckets.second[name].square()
        bias = 1 - float(self._optimizer.beta_2) ** int(self._optimizer.iterations)
        return [np.zeros_like(square), square * np.float32(bias)]

    def hand_back(self, key: Key, variable: Any, left: Left, rate: Any, compressed: bool) -> Any:
        """All of v is applied, and the second moment goes where Keras has it, from which it is taken over again.

        A gradient that waits, what coding has left of one that was sent whole, is not applied: Adam would take a full
        step for it, however small it is.
        """
        if not compressed:
            return left[RESIDUAL]
        known = tf.reduce_any(tf.not_equal(left[SECOND], 0.0))  # else the slots have everything
        variable.assign_sub(tf.where(known, tf.cast(rate * left[RESIDUAL], variable.dtype), tf.zeros_like(variable)))
        steps = tf.cast(native(self._optimizer.iterations), tf.float64)
        bias = 1 - tf.pow(tf.constant(float(self._optimizer.beta_2), tf.float64), steps)
        momentum, velocity = map(native, self.slots(key))
        momentum.assign(tf.where(known, tf.zeros_like(momentum), momentum))
        square = tf.cast(tf.cast(bias, tf.float32) * left[SECOND], velocity.dtype)
        velocity.assign(tf.where(known, square, velocity))
        return tf.where(known, tf.zeros_like(left[RESIDUAL]), left[RESIDUAL])
