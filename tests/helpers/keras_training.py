"""A smooth Keras model and its data, shared by the tests on real ranks with TensorFlow."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

from dgc_horovod.tensorflow.keras import Compression as Compression  # noqa: E402
from dgc_horovod.tensorflow.keras import DistributedOptimizer  # noqa: E402
from tests.helpers.run import target  # noqa: E402

BATCH, BATCHES, INPUTS = 16, 8, 32


def smooth_model(seed: int = 0) -> Any:
    """Tanh network of 11,393 parameters: no kinks, so that rounding differences stay small."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="tanh") for width in (96, 64, 32)]
    return keras.Sequential([keras.layers.Input((INPUTS,)), *layers, keras.layers.Dense(1)])


def momentum_sgd(**options: Any) -> Any:
    """SGD with momentum."""
    return keras.optimizers.SGD(**{"learning_rate": 0.05, "momentum": 0.9, **options})


def shard(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """One rank's part of a regression task."""
    x = np.random.default_rng(rank).standard_normal((BATCH * BATCHES, INPUTS)).astype(np.float32)
    return x, target(x)


def together(workers: int) -> tuple[np.ndarray, np.ndarray]:
    """What all ranks see, batch by batch: for one process whose batch is N times as long."""
    parts = [[a.reshape(BATCHES, BATCH, -1) for a in shard(rank)] for rank in range(workers)]
    return tuple(  # type: ignore[return-value]
        np.concatenate([part[i] for part in parts], axis=1).reshape(BATCHES * BATCH * workers, -1) for i in range(2)
    )


def loss_of(model: Any, x: Any, y: Any) -> Any:
    """Mean squared error."""
    return tf.reduce_mean((model(x) - y) ** 2)


def gradients_of(model: Any, x: Any, y: Any, wrap: Callable[[Any], Any] = lambda tape: tape) -> list[Any]:
    """Of `loss_of`, by what `wrap` makes of the tape that has recorded it."""
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    return wrap(tape).gradient(loss, model.trainable_variables)


def fit(model: Any, optimizer: Any, epochs: int = 3, callbacks: Any = (), **compiled: Any) -> Any:
    """``model.fit`` on this rank's shard; returns the model. One that has the optimizer already just goes on."""
    x, y = shard(hvd.rank())
    if compiled or getattr(model, "optimizer", None) is not optimizer:  # to compile again is to trace again
        model.compile(optimizer, "mse", **compiled)
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def train(model: Any, steps: int) -> None:
    """So many batches of this rank's shard, from its first on."""
    x, y = shard(hvd.rank())
    for step in range(steps):
        at = BATCH * (step % BATCHES)
        model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])


def fitted(optimizer: Any, compression: Any, epochs: int = 3, compiled: Any = None, **arguments: Any) -> Any:
    """A new model, fitted with `optimizer` made distributed."""
    wrapped = DistributedOptimizer(optimizer, compression=compression, **arguments)
    return fit(smooth_model(), wrapped, epochs, **(compiled or {}))


def alone(optimizer: Any, epochs: int = 3) -> Any:
    """A new model, fitted in one process on what all ranks see."""
    model = smooth_model()
    model.compile(optimizer, "mse")
    x, y = together(hvd.size())
    model.fit(x, y, batch_size=BATCH * hvd.size(), epochs=epochs, shuffle=False, verbose=0)
    return model


def weights(model: Any) -> np.ndarray:
    """All weights as one vector, of a model or a list of variables."""
    return np.concatenate([variable.numpy().ravel() for variable in getattr(model, "weights", model)])


def fingerprint(model: Any) -> str:
    """Hash of the exact bits of all weights."""
    return hashlib.sha256(weights(model).tobytes()).hexdigest()


def distance(a: Any, b: Any) -> float:
    """``|a - b| / |a|`` of two models' weights."""
    left, right = weights(a).astype(np.float64), weights(b).astype(np.float64)
    return float(np.linalg.norm(left - right) / np.linalg.norm(left))
