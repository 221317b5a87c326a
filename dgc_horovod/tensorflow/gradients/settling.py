"""Whether the second moment of a Keras optimizer has settled: the first rank measures it, and tells all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.tensorflow.gradients.host_calls import host_call
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps
from dgc_horovod.tensorflow.updates.adam import FrozenAdamUpdate
from dgc_horovod.tensorflow.wrapping.variables import Key, native


class SettlingWatch:
    """What ends the dense steps of one exchange early; before a step, since Keras applies the one before by itself.

    Args:
        steps: steps of the exchange.
        update: form in which gradients enter the residual.
        keys: keys of the compressed variables, at least one.
    """

    def __init__(self, steps: HostSteps, update: FrozenAdamUpdate, keys: Sequence[Key]) -> None:
        self._steps, self._collectives, self._update, self._keys = steps, steps.collectives, update, keys

    def __call__(self, iterations: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        """Look whether dense steps may end, where that is due; `iterations`, on which what follows must depend.

        Args:
            iterations: number of steps that the optimizer has made.
            rate: learning rate.
        """
        noting, velocities = self._steps.noting, [native(self._update.slots(key)[1]) for key in self._keys]
        (due,) = host_call(noting(self._is_due), [iterations], [tf.bool])
        due.set_shape([])

        def judged() -> tf.Tensor:
            norm = tf.add_n([tf.reduce_sum(tf.cast(velocity, tf.float64)) for velocity in velocities])
            (own,) = host_call(noting(self._judge), [iterations, rate, norm], [tf.float64])
            told = self._collectives.broadcast(own, "settled")
            (after,) = host_call(noting(self._take), [iterations, told], [tf.int64])
            return tf.reshape(after, [])

        looked: tf.Tensor = tf.cond(due, judged, lambda: tf.identity(iterations))
        return looked

    def _is_due(self, _: Any) -> list[Any]:
        buckets = self._buckets
        return [np.bool_(buckets.steps > 0 and buckets.learns_second and buckets.settling.is_due(buckets.steps))]

    def _judge(self, iterations: np.ndarray, rate: np.ndarray, norm: np.ndarray) -> list[Any]:
        self._collectives.watch.arm(f"{self._collectives.full_name('settled')}, after step {int(iterations)}")
        measured = int(iterations), float(norm), float(rate), self._update.window
        return [np.array(self._buckets.settling.judge(*measured), np.float64)]

    def _take(self, iterations: np.ndarray, told: np.ndarray) -> list[Any]:
        self._collectives.watch.disarm()
        self._buckets.settling.take(told.tolist(), self._buckets.steps)
        return [np.int64(iterations)]

    @property
    def _buckets(self) -> OptimizerExchange:
        assert self._steps.buckets is not None  # others when the ranks are
        return self._steps.buckets
