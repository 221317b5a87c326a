"""The rounds of local steps in a TensorFlow graph; the equations are those of ``torch.local.rounds``."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from dgc_horovod.config import DGCConfig
from dgc_horovod.stats import ExchangeStats
from dgc_horovod.tensorflow.gradients.host_calls import host_call
from dgc_horovod.tensorflow.wrapping.variables import Key, all_finite, is_frozen, key_of, native

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.gradients.exchange import GradientExchange


class LocalRounds:
    """The rounds of one rank: the anchor, and what an exchange makes of it.

    Args:
        variables: Keras variables whose changes are exchanged.
        config: compression settings; ``outer_rate`` and ``outer_momentum`` are used.

    Attributes:
        calls: number of times that the optimizer was called since the last exchange.
        fresh: whether the next step remembers the weights: after an exchange, or when they have been loaded.
        anchors: weights of the last exchange, one for each variable.
        outer: outer momentum, one for each variable, the same on every rank; none without.

    Memory: the anchor, as much as the weights, and as much again with outer momentum.
    """

    def __init__(self, variables: Sequence[Any], config: DGCConfig) -> None:
        self.variables, self.weights = list(variables), [native(variable) for variable in variables]
        self._rate, self._momentum = config.outer_rate, config.outer_momentum
        self._frozen: set[int] = set()
        self._means: list[tf.Variable] = []  # of second moments, at the last exchange
        with tf.init_scope():
            self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)
            self.fresh = tf.Variable(True, trainable=False)
            self.anchors = [_like(weight) for weight in self.weights]
            self.outer = [_like(weight) for weight in self.weights] if self._momentum else []
        _every.add(self)

    def begin(self, trained: Collection[Key]) -> None:
        """A step comes: before the first of a round the weights, the same on every rank, are remembered.

        Args:
            trained: keys of the variables that it changes. Of others, those that are frozen stay from now on.
        """
        self._frozen = {i for i, v in enumerate(self.variables) if is_frozen(v) and key_of(v) not in trained}
        self._remember()
        self.calls.assign_add(1)

    def tell_of_pending(self, counts: ExchangeStats, passes: int) -> None:
        """Let `counts` know how many steps, of so many calls each, no exchange has followed when the job ends."""
        calls = self.calls  # by itself, as the rest may be gone by then
        counts.count_pending = lambda: int(calls.numpy()) // passes

    def _remember(self) -> None:
        def remember() -> tf.Tensor:
            for anchor, weight in zip(self.anchors, self.weights, strict=True):
                anchor.assign(weight)
            self.fresh.assign(False)
            return tf.constant(True)

        tf.cond(self.fresh, remember, lambda: tf.constant(True))

    def exchange(
        self, exchange: GradientExchange, iterations: Any, slots: Sequence[Any], seconds: Sequence[Any], passes: int
    ) -> None:
        """Let the weights be the same on every rank; if a change was not finite, those of before the round.

        Args:
            exchange: exchange of the variables.
            iterations: number of steps that the optimizer had made before the last one.
            slots: the inner optimizer's variables for those that are trained. Where one is not finite it would spoil
                the weights again: all are emptied on that rank, as Adam's first moment is no good without the second.
            seconds: those of them that are second moments. Empty ones would let Adam, whose steps are counted on, take
                several times its step: each becomes what its mean was at the last exchange.
            passes: calls of the optimizer for one step.
        """
        self._remember()  # where weights were loaded and no step was made
        pairs = enumerate(zip(self.anchors, self.weights, strict=True))
        changes = [tf.zeros_like(anchor) if i in self._frozen else anchor - weight for i, (anchor, weight) in pairs]
        found = exchange(changes, iterations, 1.0, self.anchors, [*self.anchors, *self.outer, *slots])

        def count(calls: np.ndarray) -> list[Any]:
            exchange.steps.counts.steps_alone += max(0, int(calls) // passes - 1)
            return [np.int64(calls)]

        counted = host_call(exchange.steps.noting(count), [self.calls], [tf.int64])

        def apply() -> tf.Tensor:
            for i, (anchor, mean) in enumerate(zip(self.anchors, found.gradients, strict=True)):
                self._apply(i, anchor, tf.cast(mean, anchor.dtype))
            for second, mean in zip(seconds, self._means_of(seconds), strict=True):
                mean.assign(tf.reduce_mean(second))
            return tf.constant(True)

        def clean() -> tf.Tensor:
            sound = all_finite(slot for slot in slots if slot.dtype.is_floating)
            for slot in slots:
                slot.assign(tf.where(sound, slot, tf.zeros_like(slot)))
            for second, mean in zip(seconds, self._means_of(seconds), strict=True):
                second.assign(tf.where(sound, second, tf.fill(second.shape, mean)))
            return tf.constant(False)

        with tf.control_dependencies([*counted, tf.cond(found.finite, apply, clean)]):
            for variable, anchor, weight in zip(self.variables, self.anchors, self.weights, strict=True):
                weight.assign(anchor.read_value())
                if variable.constraint is not None:
                    variable.assign(variable.constraint(variable))
            self.fresh.assign(True)
            self.calls.assign(0)

    def _means_of(self, seconds: Sequence[Any]) -> list[tf.Variable]:
        if len(self._means) != len(seconds):
            with tf.init_scope():
                self._means = [tf.Variable(tf.zeros((), second.dtype), trainable=False) for second in seconds]
        return self._means

    def _apply(self, i: int, anchor: tf.Variable, step: tf.Tensor) -> None:
        if self.outer:
            momentum = self.outer[i].assign(self._momentum * self.outer[i] + step)
            step = step + self._momentum * momentum
        if i in self._frozen:
            for momentum in self.outer[i : i + 1]:
                momentum.assign(tf.zeros_like(momentum))
        else:
            anchor.assign_sub(self._rate * step)

    def begin_anew(self) -> None:
        """All ranks have the weights of a checkpoint, or set them: no step of a round has been made."""
        self.fresh.assign(True)
        self.calls.assign(0)

    def restart(self) -> None:
        """The weights are others: the next step begins a round, without outer momentum."""
        self.fresh.assign(True)
        for momentum in self.outer:
            momentum.assign(tf.zeros_like(momentum))

    def restart_of(self, keys: Collection[Key]) -> None:
        """The same for the variables of these keys only, wherever in a round the others are.

        Outer momentum whose own key is among them has been set with its variable, and stays.
        """
        for i, weight in enumerate(self.weights):
            if key_of(weight) in keys:
                self.anchors[i].assign(weight)
                for momentum in self.outer[i : i + 1]:
                    if key_of(momentum) not in keys:
                        momentum.assign(tf.zeros_like(momentum))


_every: weakref.WeakSet[LocalRounds] = weakref.WeakSet()


def have_been_set(variables: Iterable[Any]) -> None:
    """Some of `variables` may be in rounds: all ranks have set them to the same."""
    keys = set(map(key_of, variables))
    for rounds in _every:
        rounds.restart_of(keys)


def _like(variable: Any) -> tf.Variable:
    return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
