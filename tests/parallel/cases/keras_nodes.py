"""Four ranks on two nodes of two under Keras: what a hierarchical exchange promises."""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import (
    alone,
    distance,
    everything,
    fingerprint,
    fit,
    fitted,
    momentum_sgd,
    smooth_model,
    weights,
)


def layout() -> dict[str, Any]:
    """How much each rank keeps, what it receives, and whether the weights are those of the others."""
    hvd.init()
    optimizer = DistributedOptimizer(
        momentum_sgd(), compression=Compression.dgc(density=0.02, min_numel=16, exchange="hierarchical")
    )
    model = fit(smooth_model(), optimizer, 3)
    engines = session(optimizer).buckets.engines
    sparse = [engine for engine in engines if not engine.bucket.uncompressed]
    before = weights(model)
    optimizer.flush()
    compression = Compression.dgc(density=0.02, min_numel=16, exchange="hierarchical")
    adam = fit(smooth_model(), DistributedOptimizer(keras.optimizers.Adam(0.003), compression=compression), 2)
    second = session(adam.optimizer).buckets.second.packed()
    slots: dict[str, np.ndarray] = {}
    adam.optimizer.save_own_variables(slots)
    velocity = [float(x.sum()) for x in slots.values() if np.ndim(x) == 2]
    return {
        "adam": f"{fingerprint(adam)}, {second.tolist()}, {velocity}",
        "kept": sum(engine.state.v.size for engine in sparse),
        "all": sum(engine.whole.numel for engine in sparse),
        "fingerprint": fingerprint(model),
        "inside": optimizer.compression_stats()["bytes_inside_node"],
        "moved": float(np.abs(weights(model) - before).max()),
        "left": max(float(np.abs(engine.state.v).max()) for engine in engines),
    }


def stock() -> dict[str, float]:
    """Everything sent and nothing masked, beside one process on what all ranks see."""
    hvd.init()
    optimizers = {
        "sgd": momentum_sgd,
        "nesterov, decay": lambda: momentum_sgd(nesterov=True, weight_decay=1e-3),
        "plain": lambda: keras.optimizers.SGD(0.05),
    }
    found = {}
    for name, make in optimizers.items():
        dense = alone(make())
        found[name] = distance(dense, fitted(make(), everything(exchange="hierarchical")))
        found[f"{name}, clipped"] = distance(dense, fitted(make(), everything(clip_norm=1e6, exchange="hierarchical")))
    found["a limit"] = distance(
        alone(momentum_sgd()), fitted(momentum_sgd(), everything(clip_norm=0.01, exchange="hierarchical"))
    )
    return found


def ends_later() -> dict[str, Any]:
    """The script ends with a step, whose last round takes the first node longer."""
    hvd.init()
    if hvd.rank() < 2:
        quick = Collectives.allgather

        def slow(self: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
            if ".inside" in self.tag:
                with tf.control_dependencies([tf.py_function(lambda: time.sleep(0.5), [], [])]):
                    tensor = tf.identity(tensor)
            return quick(self, tensor, name)

        Collectives.allgather = slow  # type: ignore[method-assign]
    optimizer = DistributedOptimizer(
        momentum_sgd(), compression=Compression.dgc(density=0.02, min_numel=16, exchange="hierarchical")
    )
    return {"fingerprint": fingerprint(fit(smooth_model(), optimizer, 1))}
