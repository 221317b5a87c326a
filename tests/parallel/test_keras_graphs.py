"""Collectives in TensorFlow's graphs: they run at every step, in one order, whatever TensorFlow makes of the graph."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedGradientTape, DistributedOptimizer
from dgc_horovod.testing.tensorflow import make_exchange, session
from tests.helpers.calls import calls_to_c
from tests.helpers.keras_training import keras
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2, environment={"DGC_TIMEOUT": "20"}, timeout=200)]
WAYS = {"none": Compression.none, "dgc": Compression.dgc(0.1, dense_values="fp32")}
each_way = pytest.mark.parametrize("way", WAYS)


def _sgd(way: str = "none") -> Any:
    return DistributedOptimizer(keras.optimizers.SGD(0.1), compression=WAYS[way])


def _large_and_small() -> list[Any]:
    return [tf.Variable(tf.ones((40, 40))), tf.Variable(tf.ones((3,)))]


def test_few_calls_lie_between_a_host_call_and_c():
    """Calls of the package from one of TensorFlow's to the C library, of each bucket of a step."""
    optimizer, variable = _sgd("dgc"), tf.Variable(tf.zeros((64, 64)))
    make_exchange(optimizer, [variable])
    with calls_to_c(session(optimizer).buckets.engines[0].kernels) as found:
        optimizer.apply([tf.ones((64, 64))], [variable])
    assert found and all(calls[-1] == "accumulate" and len(calls) <= 9 for calls in found), found


def _late(x: tf.Tensor, k: int) -> tf.Tensor:
    """``(1 + 9 k) x``, on rank k after some computing."""
    x = (1.0 + 9 * k) * x
    if hvd.rank() != k:
        return x
    _, a = tf.while_loop(lambda i, a: i < 300, lambda i, a: (i + 1, tf.matmul(a, a) / x), [0, tf.eye(300) * x])
    return a[0, 0]


def test_two_exchanges_of_one_graph_are_not_mixed_up():
    """Averages had been swapped on one rank, and the replicas diverged, without a word."""
    variable, optimizer = tf.Variable(tf.zeros((4, 4))), _sgd()

    @tf.function
    def step(x: tf.Tensor) -> None:
        for gradient in [tf.ones((4, 4)) * _late(x, k) for k in range(2)]:
            optimizer.apply([tf.clip_by_value(gradient, 0.0, 2.0)], [variable])

    @tf.function
    def twice(x: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for k in range(2):
            with tf.name_scope(f"micro{k}"):
                with DistributedGradientTape(tf.GradientTape()) as tape:
                    tape.watch(variable)
                    loss = tf.reduce_sum(variable) * tf.stop_gradient(_late(x, k))
                results.append(tape.gradient(loss, [variable])[0][0, 0])
        return results

    step(tf.constant(1.0))
    applied, taped = variable.numpy()[0].tolist(), [float(each) for each in twice(tf.constant(1.0))]
    assert applied == pytest.approx([-0.3] * 4) and taped == pytest.approx([1, 10])
    same_on_ranks(applied, taped)


@each_way
def test_a_variable_that_one_rank_does_not_use_takes_part_with_zeros(way):
    """TensorFlow had run the collective of a constant once, and applied its result at every step."""
    variables, optimizer, values = _large_and_small(), _sgd(way), []

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * x)
            if hvd.rank() == 0:
                loss += tf.reduce_sum(variables[1] * x)
        optimizer.apply(tape.gradient(loss, variables), variables)

    for i in range(3):
        step(tf.constant(float(i + 1)))
        values.append(float(variables[1].numpy()[0]))
    assert values == pytest.approx([0.95, 0.85, 0.70], abs=1e-5)


@each_way
def test_a_rank_may_trace_a_constant_gradient_again(way):
    """Rank 1 does, for a last batch of another size."""
    variables, optimizer = _large_and_small(), _sgd(way)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0] * tf.reduce_mean(x)) + 0.1 * tf.reduce_sum(variables[1])
        optimizer.apply(tape.gradient(loss, variables), variables)

    for n in (8, 8, 5 if hvd.rank() else 8):
        step(tf.ones((n,)))
    assert float(variables[1].numpy()[0]) == pytest.approx(0.97, abs=1e-5)


def test_rows_that_one_rank_alone_has():
    """The other sends none, which is a constant."""
    table, vector = tf.Variable(tf.ones((10, 4))), tf.Variable(tf.ones((4,)))
    optimizer = _sgd()

    @tf.function
    def step(rows: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(vector * tf.cast(rows[1], tf.float32))
            if hvd.rank() == 0:
                loss += tf.reduce_sum(tf.gather(table, rows))
        optimizer.apply(tape.gradient(loss, [table, vector]), [table, vector])

    for _ in range(2):
        step(tf.constant([0, 1]))
    assert table.numpy()[:3, 0].tolist() == pytest.approx([0.9, 0.9, 1.0], abs=1e-6)
    assert float(vector.numpy()[0]) == pytest.approx(0.8, abs=1e-6)


def test_an_output_without_a_loss_on_one_rank():
    keras.utils.set_random_seed(0)
    inputs = keras.layers.Input((8,))
    hidden = keras.layers.Dense(16)(inputs)
    model = keras.Model(inputs, [keras.layers.Dense(1, name="a")(hidden), keras.layers.Dense(1, name="b")(hidden)])
    model.compile(_sgd(), loss=["mse", None if hvd.rank() else "mse"])
    x = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model.fit(x, [y, y], batch_size=16, verbose=0)
    sizes = [float(abs(each.numpy()).sum()) for each in model.trainable_variables]
    assert sizes[0] > 0
    same_on_ranks(sizes)
