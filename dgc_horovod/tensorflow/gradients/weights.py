"""Weights that are not finite: seen where a gradient is not, or soon after an optimizer has made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dgc_horovod.errors import NotFinite
from dgc_horovod.notices import LOOKS, made_not_finite
from dgc_horovod.tensorflow.gradients.host_calls import host_call
from dgc_horovod.tensorflow.gradients.host_steps import HostSteps
from dgc_horovod.tensorflow.wrapping.variables import Source


class WeightsWatch:
    """Looks at the weights of one exchange where a gradient is not finite, to say so if they are not either.

    Of an optimizer whose arithmetic is not known it also looks after its first compressed steps: before the next one
    is applied, since Keras applies the one before by itself.

    Args:
        sources: variables of the exchange, in its order.
        steps: its steps on this rank.
    """

    def __init__(self, sources: Sequence[Source], steps: HostSteps) -> None:
        self._names, self._steps = [source.name for source in sources], steps
        self._looks, self._seen = LOOKS if steps.update.unknown else 0, 0

    def due(self) -> bool:
        """Whether the step before is one to be looked at whatever gradients are."""
        assert self._steps.buckets is not None
        counts, seen = self._steps.buckets.counts, self._seen
        self._seen = counts.steps - counts.skipped
        is_due = self._looks > 0 and self._seen > seen and counts.density_now < 1
        self._looks -= is_due
        return is_due

    def __call__(self, due: tf.Tensor, flags: Sequence[tf.Tensor], weights: Sequence[Any]) -> tf.Tensor:
        """What the end of the step must come after.

        Args:
            due: what `due` has said at its beginning.
            flags: whether each part of what came back is finite.
            weights: variables, one for each of the sources.
        """
        assert self._steps.buckets is not None
        due.set_shape([])
        if self._steps.buckets.config.exchanges_weights or not weights:  # weights are what is exchanged; no case
            return due

        def look() -> tf.Tensor:
            sound = tf.stack([tf.reduce_all(tf.math.is_finite(weight)) for weight in weights])
            (looked,) = host_call(self._steps.noting(self._judge), [due, sound], [tf.bool])
            looked.set_shape([])
            return looked

        done: tf.Tensor = tf.cond(tf.reduce_all(flags) & ~due, lambda: tf.constant(False), look)
        return done

    def _judge(self, due: np.ndarray, sound: np.ndarray) -> list[Any]:
        """Raises NotFinite: the optimizer has made such weights; on every rank, as they are the same."""
        assert self._steps.buckets is not None
        buckets, update = self._steps.buckets, self._steps.update
        name = next((name for name, is_sound in zip(self._names, sound, strict=True) if not is_sound), "")
        if due and name:
            raise NotFinite(made_not_finite(buckets.steps - 1, name, update.unknown))
        buckets.ending.spoilt = lambda: name
        return [np.bool_(True)]
