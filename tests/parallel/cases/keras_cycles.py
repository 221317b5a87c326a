"""Keras optimizers made, used and let go of, again and again in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.growth import CYCLES, growth
from tests.helpers.keras_training import BATCH, INPUTS, keras, momentum_sgd

WIDTH = 1024  # of a model whose u, v, weights or slots would be seen: 4 MiB each


def _compressions() -> dict[str, Callable[[], Any]]:
    """Those that the long run has; the short one, of which tracing is the most, has the first."""
    dgc = {"dgc": lambda: Compression.dgc(0.05, min_numel=16)}
    others = {"none": lambda: Compression.none, "auto": Compression.auto, "local": lambda: Compression.local(2)}
    return {**dgc, **(others if CYCLES >= 300 else {})}


def _parts(optimizer: Any, model: Any) -> list[weakref.ref[Any]]:
    """What is to go with an optimizer."""
    exchanges = session(optimizer).exchanges if hasattr(optimizer, "compression_stats") else []
    runs = [run for exchange in exchanges for run in getattr(exchange.steps, "runs", ())]
    memory = [each for run in runs for each in (run.engine, run.blocks)]
    return [weakref.ref(each) for each in (optimizer, model, *exchanges, *memory)]


def eager() -> dict[str, Any]:
    """Steps of a loop of one's own."""
    hvd.init()
    x = tf.constant(np.random.default_rng(0).standard_normal((BATCH, INPUTS)), tf.float32)

    def cycle(compression: Any) -> list[weakref.ref[Any]]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((INPUTS,)), keras.layers.Dense(64)])
        optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return _parts(optimizer, model)

    return {name: growth(lambda make=make: cycle(make()), CYCLES) for name, make in _compressions().items()}


def at_once() -> dict[str, bool]:
    """What is left of an optimizer that was dropped, before the garbage collector comes: u and v are large."""
    hvd.init()
    variables = [keras.Variable(np.ones((64, 32), np.float32))]
    gc.collect()
    gc.disable()
    try:
        optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.05, min_numel=16))
        for _ in range(2):
            optimizer.apply([tf.ones((64, 32))], variables)
        buckets = session(optimizer).buckets
        parts = [weakref.ref(each) for each in (session(optimizer).exchange, buckets, buckets.engines[0].state)]
        del optimizer, buckets
        return {type(each()).__name__: each() is not None for each in parts if each() is not None}
    finally:
        gc.enable()


def fit() -> dict[str, Any]:
    """``model.fit``, beside Keras alone, which keeps the graphs of models that are gone."""
    hvd.init()
    x = np.zeros((8, WIDTH), np.float32)

    def cycle(compression: Any) -> list[weakref.ref[Any]]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(WIDTH)])
        plain = momentum_sgd()
        optimizer = plain if compression is None else DistributedOptimizer(plain, compression=compression)
        model.compile(optimizer, "mse")
        model.fit(x, x, batch_size=4, verbose=0)
        gc.collect()
        return _parts(optimizer, model)

    made = {"alone": lambda: None, **_compressions()}
    return {name: growth(lambda make=make: cycle(make()), CYCLES // 6) for name, make in made.items()}
