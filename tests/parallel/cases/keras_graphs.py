"""Collectives in TensorFlow's graphs: they run at every step, in one order, whatever TensorFlow makes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedGradientTape, DistributedOptimizer
from dgc_horovod.testing.tensorflow import make_exchange, session
from tests.helpers.calls import calls_to_c
from tests.helpers.keras_training import keras

WAYS: dict[str, Callable[[], Any]] = {
    "none": lambda: Compression.none,
    "dgc": lambda: Compression.dgc(0.1, dense_values="fp32"),
}


def _sgd(way: str) -> Any:
    hvd.init()
    return DistributedOptimizer(keras.optimizers.SGD(0.1), compression=WAYS[way]())


def _late(x: tf.Tensor, rounds: int) -> tf.Tensor:
    """`x`, after some computing."""
    if not rounds:
        return x
    _, a = tf.while_loop(lambda i, a: i < rounds, lambda i, a: (i + 1, tf.matmul(a, a) / x), [0, tf.eye(300) * x])
    return a[0, 0]


def from_host_call_to_c() -> list[list[str]]:
    """Calls of the package from one of TensorFlow's to the C library, of each bucket of a step."""
    optimizer, variable = _sgd("dgc"), tf.Variable(tf.zeros((64, 64)))
    make_exchange(optimizer, [variable])
    with calls_to_c(session(optimizer).buckets.engines[0].kernels) as calls:
        optimizer.apply([tf.ones((64, 64))], [variable])
    return calls


def same_names() -> dict[str, list[float]]:
    """Two exchanges of one graph; the first is late on rank 0, and the second on rank 1."""
    hvd.init()
    found = {}
    variable = tf.Variable(tf.zeros((4, 4)))
    optimizer = _sgd("none")

    @tf.function
    def step(x: tf.Tensor) -> None:
        given = [tf.ones((4, 4)) * _late((1.0 + 9 * k) * x, 300 if hvd.rank() == k else 0) for k in range(2)]
        for gradient in given:
            optimizer.apply([tf.clip_by_value(gradient, 0.0, 2.0)], [variable])

    step(tf.constant(1.0))
    found["optimizer"] = variable.numpy()[0].tolist()

    @tf.function
    def twice(x: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for k in range(2):
            with tf.name_scope(f"micro{k}"):
                with DistributedGradientTape(tf.GradientTape()) as tape:
                    tape.watch(variable)
                    late = _late((1.0 + 9 * k) * x, 300 if hvd.rank() == k else 0)
                    loss = tf.reduce_sum(variable) * tf.stop_gradient(late)
                results.append(tape.gradient(loss, [variable])[0][0, 0])
        return results

    found["tape"] = [float(each) for each in twice(tf.constant(1.0))]
    return found


def unused_on_one_rank() -> dict[str, list[float]]:
    """A variable that has no gradient on rank 1, where it is zeros: a constant."""
    found = {}
    for way in WAYS:
        variables = [tf.Variable(tf.ones((40, 40))), tf.Variable(tf.ones((3,)))]
        optimizer, values = _sgd(way), []

        @tf.function
        def step(x: tf.Tensor, optimizer: Any = optimizer, variables: Any = variables) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0] * x)
                if hvd.rank() == 0:
                    loss += tf.reduce_sum(variables[1] * x)
            optimizer.apply(tape.gradient(loss, variables), variables)

        for i in range(3):
            step(tf.constant(float(i + 1)))
            values.append(float(variables[1].numpy()[0]))
        found[way] = values
    return found


def traced_again() -> dict[str, float]:
    """A gradient that is a constant; rank 1 traces the graph again, for a last batch of another size."""
    found = {}
    for way in WAYS:
        variables = [tf.Variable(tf.ones((40, 40))), tf.Variable(tf.ones((3,)))]
        optimizer = _sgd(way)

        @tf.function
        def step(x: tf.Tensor, optimizer: Any = optimizer, variables: Any = variables) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[0] * tf.reduce_mean(x)) + 0.1 * tf.reduce_sum(variables[1])
            optimizer.apply(tape.gradient(loss, variables), variables)

        for n in (8, 8, 5 if hvd.rank() else 8):
            step(tf.ones((n,)))
        found[way] = float(variables[1].numpy()[0])
    return found


def sparse_on_one_rank() -> list[float]:
    """Rows that rank 0 alone has; the other sends none, which is a constant."""
    table, vector = tf.Variable(tf.ones((10, 4))), tf.Variable(tf.ones((4,)))
    optimizer = _sgd("none")

    @tf.function
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(vector * tf.cast(rows[1], tf.float32))
            if hvd.rank() == 0:
                loss += tf.reduce_sum(tf.gather(table, rows))
        optimizer.apply(tape.gradient(loss, [table, vector]), [table, vector])

    for _ in range(2):
        step(tf.constant([0, 1]))
    return np.concatenate([table.numpy()[:3, 0], vector.numpy()[:1]]).tolist()


def two_outputs() -> list[float]:
    """`fit`, where rank 1 has no loss for one of two outputs."""
    hvd.init()
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((8,))
    hidden = keras.layers.Dense(16)(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])
    model.compile(_sgd("none"), loss=["mse", None if hvd.rank() else "mse"])
    x = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model.fit(x, [y, y], batch_size=16, verbose=0)
    return [float(abs(w.numpy()).sum()) for w in model.trainable_variables]
