"""A Keras optimizer that is gone leaves nothing behind: no file, no thread, no memory, however many there have been."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.growth import MANY, check_growth, each_length, growth
from tests.helpers.keras_training import BATCH, INPUTS, keras, momentum_sgd

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2, timeout=280)]
WIDTH = 1024  # of a model whose u, v, weights or slots would be seen: 4 MiB each


def _compressions(cycles: int) -> list[Callable[[], Any]]:
    """Those that the long run has; the short one, of which tracing is the most, has the first."""
    others = [lambda: Compression.none, Compression.auto, lambda: Compression.local(2)]
    return [lambda: Compression.dgc(0.05, min_numel=16), *(others if cycles == MANY else [])]


def _parts(optimizer: Any, model: Any) -> list[weakref.ref[Any]]:
    """What is to go with an optimizer."""
    exchanges = session(optimizer).exchanges if hasattr(optimizer, "compression_stats") else []
    runs = [run for exchange in exchanges for run in getattr(exchange.steps, "runs", ())]
    memory = [each for run in runs for each in (run.engine, run.blocks)]
    return [weakref.ref(each) for each in (optimizer, model, *exchanges, *memory)]


def test_an_optimizer_takes_its_state_with_it():
    """Before the garbage collector comes: u and v are large.

    Its exchange, the clock that noticed reloads and the functions of its graphs had referred to each other.
    """
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
        assert [type(each()).__name__ for each in parts if each() is not None] == []
    finally:
        gc.enable()


@pytest.mark.slow  # a minute, as TensorFlow traces graphs
@each_length
def test_optimizers_of_eager_steps(cycles):
    """A loop of one's own. Graphs, which TensorFlow keeps, had kept optimizers alive with u, v and slots."""
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

    for make in _compressions(cycles):
        check_growth(growth(lambda make=make: cycle(make()), cycles))


@pytest.mark.slow  # a minute, as TensorFlow traces graphs
@each_length
def test_optimizers_of_fit(cycles):
    """Beside Keras alone, which keeps the graphs of models that are gone; a thread had kept all clocks."""
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

    alone = growth(lambda: cycle(None), cycles // 6)
    for make in _compressions(cycles):
        # our graphs are larger, and TensorFlow keeps what they hold, slots and zeros of their size
        found = growth(lambda make=make: cycle(make()), cycles // 6)
        check_growth(found, 5 * alone["objects"], alone["kilobytes"] + 3 * 4096)
