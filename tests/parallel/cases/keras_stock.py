"""What stock Horovod does under Keras 3, so that the README's claim stays true."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape
from tests.helpers.errors import error_of
from tests.helpers.keras_training import (
    Compression,
    distance,
    fingerprint,
    fit,
    fitted,
    momentum_sgd,
    shard,
    smooth_model,
)


def optimizers() -> dict[str, str]:
    """Hash of the weights after ``fit`` from equal weights, with Horovod's optimizer and with ours."""
    hvd.init()
    return {
        "stock": fingerprint(fit(smooth_model(), stock.DistributedOptimizer(momentum_sgd()))),
        "ours": fingerprint(fitted(momentum_sgd(), Compression.none)),
    }


def tapes() -> dict[str, Any]:
    """What happens to a gradient of Keras variables under Horovod's tape, and under ours."""
    hvd.init()
    model, (x, y) = smooth_model(), shard(hvd.rank())

    def gradients(wrap: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return wrap(tape).gradient(loss, model.trainable_variables)

    ours = gradients(DistributedGradientTape)
    return {
        "stock": error_of(lambda: gradients(hvd.DistributedGradientTape)),
        "ours": [float(tf.reduce_sum(tf.abs(gradient))) for gradient in ours],
    }


def callbacks() -> dict[str, str]:
    """What happens in ``fit`` with Horovod's callbacks."""
    hvd.init()

    def train(callback: Any) -> str:
        return error_of(lambda: fit(smooth_model(), momentum_sgd(), 1, [callback]))

    return {
        "broadcast": train(stock.callbacks.BroadcastGlobalVariablesCallback(0)),
        "metrics": train(stock.callbacks.MetricAverageCallback()),
        "warm-up": train(stock.callbacks.LearningRateWarmupCallback(0.1)),
        "distance of equal models": str(distance(smooth_model(), smooth_model())),
    }
