"""Whether gradients can travel as half precision: `torch.auto.half` in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dgc_horovod.planning.half import LARGEST, LOST


def fits(gradients: Sequence[tf.Tensor], factor: float) -> tf.Tensor:
    """Whether half precision has room for every tensor's largest elements, and for its small ones.

    Args:
        gradients: dense gradients, any shape, averaged over the ranks.
        factor: number of ranks, which are summed before they are divided, > 0.

    Returns:
        Whether all are float32 or float16, none exceeds an eighth of fp16's range, and none loses 1% of its norm.

    Cost: three passes over the gradients.
    """
    return tf.reduce_all([_fits(gradient, factor) for gradient in gradients])


def _fits(gradient: tf.Tensor, factor: float) -> tf.Tensor:
    if gradient.dtype == tf.float16 or gradient.shape.num_elements() == 0:
        return tf.constant(True)
    if gradient.dtype != tf.float32:
        return tf.constant(False)  # float64's digits, bfloat16's range
    lost = gradient - tf.cast(tf.cast(gradient, tf.float16), tf.float32)
    small = tf.norm(lost) <= LOST * tf.norm(gradient)
    return tf.logical_and(tf.reduce_max(tf.abs(gradient)) * factor <= LARGEST, small)
