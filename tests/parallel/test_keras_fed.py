"""Steps on gradients that are given: the engine's numbers, None, what is not finite, Keras' arithmetic by hand."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.fed import DENSITY, MIN_NUMEL, RATE, SETTINGS, SHAPES, STEPS, gradients, looked_at
from tests.helpers.keras_training import keras, momentum_sgd, weights
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.run import everything

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
in_both_modes = pytest.mark.parametrize("mode", ["graph", "eager"])


def _variables(shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Any]:
    return [keras.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]


def _runner(optimizer: Any, variables: list[Any], mode: str) -> Any:
    """A function of the gradients that applies them, as a graph or eagerly."""

    def apply(*gradients: Any) -> None:
        optimizer.apply(list(gradients), variables)

    return tf.function(apply) if mode == "graph" else apply


def with_tensorflow(mode: str) -> dict[str, list[dict[str, str]]]:
    """As `fed_to_horovod`."""
    found = {}
    for name, (fields, options) in SETTINGS.items():
        variables = _variables()
        compression = Compression.dgc(**{"density": DENSITY, "min_numel": MIN_NUMEL, **fields})
        optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE, **options), compression=compression)
        run = _runner(optimizer, variables, mode)
        rows = found[name] = []
        for step in gradients(hvd.rank()):
            run(*map(tf.constant, step.values()))
            rows.append(looked_at(session(optimizer).buckets))
    return found


@functools.cache
def _of_torch() -> list[Any]:
    from tests.parallel.test_ddp_fed import fed_to_horovod  # not on ranks of Keras: Horovod has one framework's sets

    return on_ranks(fed_to_horovod, 2, "torch")


@pytest.mark.slow  # that bits stay what they were: test_transcripts.py
@pytest.mark.on_ranks(0)
@pytest.mark.parametrize(
    "environment", [{}, {"DGC_BACKEND": "torch_eager"}], ids=["default", "through torch and DLPack"]
)
@in_both_modes
def test_the_engines_numbers_are_those_of_the_torch_adapter(mode, environment):
    """By default, and on the way of gradients on a GPU, here on the host."""
    assert on_ranks(with_tensorflow, 2, "keras", arguments={"mode": mode}, environment=environment) == _of_torch()
    for found in _of_torch():
        assert found.keys() == SETTINGS.keys()
        for rows in found.values():
            assert len({row["v"] for row in rows}) == STEPS, "the residual does not move"
        assert all(int(rows[-1]["non-zero"]) > 0 for name, rows in found.items() if name != "scattered")


STEPS_BY_HAND, SHAPE = 6, (20, 30)


def _draws() -> list[np.ndarray]:
    return [
        np.random.default_rng(rank).standard_normal((STEPS_BY_HAND, *SHAPE)).astype(np.float32)
        for rank in range(hvd.size())
    ]


def _moved(optimizer: Any, velocity: np.ndarray | None = None) -> np.ndarray:
    """A variable that was zero, after this rank's draws at density 1."""
    variable = keras.Variable(tf.zeros(SHAPE))
    if velocity is not None:
        optimizer.build([variable])
        optimizer.momentums[0].assign(velocity)
    wrapped = DistributedOptimizer(optimizer, compression=everything())
    apply = tf.function(lambda g: wrapped.apply([g], [variable]))
    for gradient in _draws()[hvd.rank()]:
        apply(tf.constant(gradient))
    if getattr(wrapped, "momentums", None):
        assert not np.any(wrapped.momentums[0].numpy()), "the slot was not emptied"
    return variable.numpy()


def test_arithmetic_by_hand():
    """Written out in NumPy: with a schedule, in torch's form; with a velocity of a checkpoint; Adam in Keras' form."""
    means = np.mean(_draws(), axis=0, dtype=np.float64)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.7)
    start = np.random.default_rng(9).standard_normal(SHAPE).astype(np.float32)
    u, velocity = np.zeros(SHAPE), start.astype(np.float64)
    first, second, scheduled, going_on, adam = (np.zeros(SHAPE) for _ in range(5))
    for t, mean in enumerate(means):
        u = 0.9 * u + mean
        scheduled -= 0.1 * 0.7**t * u
        velocity = 0.9 * velocity - 0.05 * mean
        going_on += velocity
        first, second = 0.9 * first + 0.1 * mean, 0.999 * second + 0.001 * mean * mean
        corrected = 0.01 * np.sqrt(1 - 0.999 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        adam -= corrected * first / (np.sqrt(second) + 1e-2)  # epsilon beside the uncorrected root
    assert np.abs(_moved(momentum_sgd(learning_rate=schedule)) - scheduled).max() < 1e-5
    assert np.abs(_moved(momentum_sgd(), start) - going_on).max() < 1e-5
    assert np.abs(_moved(keras.optimizers.Adam(0.01, epsilon=1e-2)) - adam).max() < 1e-5


@pytest.mark.parametrize("name", ["none", "everything"])
def test_missing_gradients(name):
    """None on one rank, on all ranks, and where the others agreed that there is none."""
    variables = _variables({"a": (20, 30), "b": (30, 20), "c": (20, 20)})
    compression = Compression.none if name == "none" else everything(dense_values="fp32")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
    ones = [tf.ones(variable.shape) for variable in variables]
    for having in range(2):
        optimizer.apply([ones[0], ones[1] if hvd.rank() == having else None, None], variables)
    assert [float(variable.numpy().mean()) for variable in variables] == [-2.0, -1.0, 0.0]
    with pytest.raises(Exception, match="'c' had a gradient on no rank at the first step"):
        optimizer.apply(ones, variables)


@in_both_modes
def test_a_step_that_is_not_finite_is_applied_nowhere(mode):
    """A NaN on one rank: nothing enters u or v either, decay and Adam's slots stay too."""
    variable = keras.Variable(tf.ones((40, 50)))
    sgd = momentum_sgd(learning_rate=0.1, weight_decay=0.1)
    optimizer = DistributedOptimizer(sgd, compression=Compression.dgc(0.05))
    run = _runner(optimizer, [variable], mode)
    rng = np.random.default_rng(hvd.rank())
    values, residuals = [], []
    for step in range(4):
        gradient = rng.standard_normal((40, 50)).astype(np.float32)
        if step == 2 and hvd.rank() == 1:
            gradient[3, 4] = np.nan
        run(tf.constant(gradient))
        values.append(variable.numpy().copy())
        residuals.append(next(iter(session(optimizer).buckets.state_arrays().values()))["v"])
    assert np.array_equal(values[1], values[2])
    assert not np.array_equal(values[0], values[1]) and not np.array_equal(values[2], values[3])
    assert np.isfinite(residuals[3]).all() and not np.array_equal(residuals[1], residuals[2])
    same_on_ranks(float(values[3].sum()))


def _overflowing(scaled: bool, compression: Any, **arguments: Any) -> Any:
    """A model whose second batch of four overflows on rank 1."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(1, dtype="float32")]
    model, sgd = keras.Sequential(layers), momentum_sgd(learning_rate=0.01)
    stock = keras.optimizers.LossScaleOptimizer(sgd) if scaled else sgd
    model.compile(DistributedOptimizer(stock, compression=compression, **arguments), "mse")
    x = np.random.default_rng(hvd.rank()).standard_normal((64, 16)).astype(np.float32)
    if hvd.rank() == 1:
        x[20] = 6e4
    model.fit(x, x.sum(1, keepdims=True), batch_size=16, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("way", ["scaler inside", "compile's own", "dense", "accumulating"])
def test_an_overflow_on_one_rank_is_skipped_on_all(way):
    """mixed_float16, in every way to get a loss scale."""
    compression = Compression.none if way == "dense" else Compression.dgc(0.05, min_numel=64)
    passes = 2 if way == "accumulating" else 1
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = _overflowing(way != "compile's own", compression, backward_passes_per_step=passes)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer, found = model.optimizer, weights(model)
    scale, steps = float(optimizer.dynamic_scale.numpy()), optimizer.compression_stats()["steps"]
    iterations = int(optimizer.inner_optimizer._iterations.numpy())
    skipped = round(math.log2(2.0**15 / scale))
    assert np.isfinite(found).all() and 1 <= skipped <= 2
    assert iterations == 4 - skipped and steps == iterations // passes
    same_on_ranks(scale, iterations, found.tobytes().hex()[:4000], steps)
