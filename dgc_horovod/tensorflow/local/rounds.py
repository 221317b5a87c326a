"""The rounds of local steps in a TensorFlow graph; the equations are those of ``torch.local.rounds``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dgc_horovod.config import DGCConfig
from dgc_horovod.tensorflow.updates.base import PlainUpdate
from dgc_horovod.tensorflow.wrapping.variables import native


class LocalUpdate(PlainUpdate):
    """The inner optimizer takes its own gradients; what is exchanged are changes of weights."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def flush(self, optimizer: Any, left: Sequence[tuple[Any, Any]], compressed: Any) -> list[Any]:
        """Apply what all ranks together had kept: nothing of it is left."""
        for variable, parts in left:
            for change in parts.values():
                native(variable).assign_sub(tf.cast(self._rate * change, native(variable).dtype))
        return [None] * len(left)


class LocalRounds:
    """The rounds of one rank: the anchor, and what an exchange makes of it.

    Args:
        variables: whose changes are exchanged.
        config: compression settings; ``outer_rate`` and ``outer_momentum`` are used.

    Attributes:
        begun: whether a step was made since the last exchange.
        anchors: weights of the last exchange, one for each variable.

    Memory: the anchor, as much as the weights, and as much again with outer momentum.
    """

    def __init__(self, variables: Sequence[Any], config: DGCConfig) -> None:
        self.variables = [native(variable) for variable in variables]
        self._rate, self._momentum = config.outer_rate, config.outer_momentum
        with tf.init_scope():
            self.begun = tf.Variable(False, trainable=False)
            self.anchors = [_like(variable) for variable in self.variables]
            self.outer = [_like(variable) for variable in self.variables] if self._momentum else []

    def begin(self) -> None:
        """A step comes: before the first of a round the weights, the same on every rank, are remembered."""

        def remember() -> tf.Tensor:
            for anchor, variable in zip(self.anchors, self.variables, strict=True):
                anchor.assign(variable)
            self.begun.assign(True)
            return tf.constant(True)

        tf.cond(self.begun, lambda: tf.constant(True), remember)

    def exchange(self, exchange: Callable[..., Any], iterations: Any, slots: Sequence[Any]) -> None:
        """Let the weights be the same on every rank; if a change was not finite, those of before the round.

        Args:
            exchange: the `GradientExchange` of the variables.
            iterations: number of steps that the optimizer had made before the last one.
            slots: the inner optimizer's variables, which would spoil the weights again where they are not finite.
        """
        changes = [anchor - variable for anchor, variable in zip(self.anchors, self.variables, strict=True)]
        found = exchange(changes, iterations, 1.0, self.anchors, self.anchors)

        def apply() -> tf.Tensor:
            for i, (anchor, mean) in enumerate(zip(self.anchors, found.gradients, strict=True)):
                step = tf.cast(mean, anchor.dtype)
                if self.outer:
                    momentum = self.outer[i].assign(self._momentum * self.outer[i] + step)
                    step = step + self._momentum * momentum
                anchor.assign_sub(self._rate * step)
            return tf.constant(True)

        def clean() -> tf.Tensor:
            for slot in slots:
                if slot.dtype.is_floating:
                    slot.assign(tf.where(tf.math.is_finite(slot), slot, tf.zeros_like(slot)))
            return tf.constant(False)

        with tf.control_dependencies([tf.cond(found.finite, apply, clean)]):
            for anchor, variable in zip(self.anchors, self.variables, strict=True):
                variable.assign(anchor.read_value())
            self.begun.assign(False)


def _like(variable: Any) -> tf.Variable:
    return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
