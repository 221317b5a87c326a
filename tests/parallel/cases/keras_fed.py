"""Steps on gradients that are given: the engine's numbers, None, what is not finite, Keras' arithmetic by hand."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.fed import DENSITY, MIN_NUMEL, RATE, SETTINGS, SHAPES, gradients, looked_at
from tests.helpers.keras_training import everything, keras, momentum_sgd


def _variables(shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Any]:
    return [keras.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]


def _runner(optimizer: Any, variables: list[Any], mode: str) -> Any:
    """A function of the gradients that applies them, as a graph or eagerly."""

    def apply(*gradients: Any) -> None:
        optimizer.apply(list(gradients), variables)

    return tf.function(apply) if mode == "graph" else apply


def with_tensorflow() -> dict[str, Any]:
    """The TensorFlow half: as ``fed.with_torch``, in graphs and eagerly."""
    hvd.init()
    found: dict[str, Any] = {"graph": {}, "eager": {}}
    for name, (fields, options) in SETTINGS.items():
        for mode in found:
            variables = _variables()
            compression = Compression.dgc(**{"density": DENSITY, "min_numel": MIN_NUMEL, **fields})
            optimizer = DistributedOptimizer(keras.optimizers.SGD(RATE, **options), compression=compression)
            run = _runner(optimizer, variables, mode)
            rows = []
            for step in gradients(hvd.rank()):
                run(*map(tf.constant, step.values()))
                rows.append(looked_at(session(optimizer).buckets))
            found[mode][name] = rows
    return found


def by_hand() -> dict[str, float]:
    """Largest difference from the arithmetic written out in NumPy, at density 1: with a schedule, Adam, a velocity."""
    hvd.init()
    size, steps = hvd.size(), 6
    draws = [np.random.default_rng(rank).standard_normal((steps, 20, 30)).astype(np.float32) for rank in range(size)]
    mine = draws[hvd.rank()]

    def final(optimizer: Any, velocity: np.ndarray | None = None, **fields: Any) -> np.ndarray:
        variable = keras.Variable(tf.zeros((20, 30)))
        if velocity is not None:
            optimizer.build([variable])
            optimizer.momentums[0].assign(velocity)
        wrapped = DistributedOptimizer(optimizer, compression=everything(**fields))
        apply = tf.function(lambda g: wrapped.apply([g], [variable]))
        for gradient in mine:
            apply(tf.constant(gradient))
        if getattr(wrapped, "momentums", None):
            assert not np.any(wrapped.momentums[0].numpy()), "the slot was not emptied"
        return variable.numpy()

    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.7)
    u, torch_form = np.zeros((20, 30)), np.zeros((20, 30))
    for t, mean in enumerate(np.mean(draws, axis=0, dtype=np.float64)):
        u = 0.9 * u + mean
        torch_form = torch_form - 0.1 * 0.7**t * u
    found = {"schedule, torch's form": final(momentum_sgd(learning_rate=schedule)) - torch_form}

    start = np.random.default_rng(9).standard_normal((20, 30)).astype(np.float32)
    velocity, w = start.astype(np.float64), np.zeros((20, 30))
    for mean in np.mean(draws, axis=0, dtype=np.float64):
        velocity = 0.9 * velocity - 0.05 * mean
        w = w + velocity
    found["velocity of a checkpoint"] = final(momentum_sgd(), start) - w

    def adam(draw: np.ndarray) -> np.ndarray:
        """Keras' form: epsilon beside the uncorrected root."""
        first, second, moved = np.zeros((20, 30)), np.zeros((20, 30)), np.zeros((20, 30))
        for t, g in enumerate(draw.astype(np.float64), start=1):
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
            moved -= 0.01 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * first / (np.sqrt(second) + 1e-2)
        return moved

    found["adam"] = final(keras.optimizers.Adam(0.01, epsilon=1e-2)) - adam(np.mean(draws, axis=0, dtype=np.float64))
    return {name: float(np.abs(difference).max()) for name, difference in found.items()}


def missing_gradients() -> dict[str, Any]:
    """None on one rank, on all ranks, and where the others agreed that there is none."""
    hvd.init()
    rank = hvd.rank()
    found: dict[str, Any] = {}
    for name, compression in {"none": Compression.none, "everything": everything(dense_values="fp32")}.items():
        variables = _variables({"a": (20, 30), "b": (30, 20), "c": (20, 20)})
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression)
        ones = [tf.ones(variable.shape) for variable in variables]
        optimizer.apply([ones[0], ones[1] if rank == 0 else None, None], variables)
        optimizer.apply([ones[0], ones[1] if rank == 1 else None, None], variables)
        found[name] = [float(variable.numpy().mean()) for variable in variables]
        found[f"{name}: late"] = error_of(lambda o=optimizer, g=ones, v=variables: o.apply(g, v))
    return found


def not_finite() -> dict[str, Any]:
    """A NaN on one rank: nobody applies the step, nothing enters u or v, decay and Adam's slots stay too."""
    hvd.init()
    found: dict[str, Any] = {}
    for mode in ("graph", "eager"):
        variable = keras.Variable(tf.ones((40, 50)))
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1), compression=Compression.dgc(0.05)
        )
        run = _runner(optimizer, [variable], mode)
        rng = np.random.default_rng(hvd.rank())
        states = []
        for step in range(4):
            gradient = rng.standard_normal((40, 50)).astype(np.float32)
            if step == 2 and hvd.rank() == 1:
                gradient[3, 4] = np.nan
            run(tf.constant(gradient))
            arrays = next(iter(session(optimizer).buckets.state_arrays().values()))
            states.append((variable.numpy().copy(), arrays["v"]))
        found[mode] = {
            "weights stay": bool(np.array_equal(states[1][0], states[2][0])),
            "weights move before and after": not np.array_equal(states[0][0], states[1][0])
            and not np.array_equal(states[2][0], states[3][0]),
            "residual is finite": bool(np.isfinite(states[3][1]).all()),
            "residual moves": not np.array_equal(states[1][1], states[2][1]),
            "weights": float(states[3][0].sum()),
        }
    return found


def overflow() -> dict[str, Any]:
    """mixed_float16: a gradient that overflows on one rank is skipped on all, in every way to get a loss scale."""
    hvd.init()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return {
            "scaler inside": _overflowing(lambda o, c: DistributedOptimizer(_scaled(o), compression=c)),
            "compile's own": _overflowing(lambda o, c: DistributedOptimizer(o, compression=c)),
            "dense": _overflowing(lambda o, c: DistributedOptimizer(_scaled(o), compression=Compression.none)),
            "accumulating": _overflowing(
                lambda o, c: DistributedOptimizer(_scaled(o), compression=c, backward_passes_per_step=2)
            ),
        }
    finally:
        keras.config.set_dtype_policy("float32")


def _scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer)


def _overflowing(make: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((16,)), keras.layers.Dense(64), keras.layers.Dense(1, dtype="float32")]
    model = keras.Sequential(layers)
    model.compile(make(momentum_sgd(learning_rate=0.01), Compression.dgc(0.05, min_numel=64)), "mse")
    x = np.random.default_rng(hvd.rank()).standard_normal((64, 16)).astype(np.float32)
    if hvd.rank() == 1:
        x[20] = 6e4  # the second batch of four
    model.fit(x, x.sum(1, keepdims=True), batch_size=16, shuffle=False, verbose=0)
    weights = np.concatenate([variable.numpy().ravel() for variable in model.weights])
    return {
        "scale": float(model.optimizer.dynamic_scale.numpy()),
        "iterations": int(model.optimizer.inner_optimizer._iterations.numpy()),
        "finite": bool(np.isfinite(weights).all()),
        "weights": weights.tobytes().hex()[:4000],
        "stats": model.optimizer.compression_stats()["steps"],
    }
