"""``DistributedGradientTape`` on real ranks: dense, compressed, persistent, nested, sparse, local."""

from __future__ import annotations

import hashlib
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedGradientTape, broadcast_variables
from tests.helpers.errors import error_of
from tests.helpers.keras_training import EVERYTHING, keras, shard, smooth_model
from tests.helpers.logs import messages


def _mean(tensor: Any) -> np.ndarray:
    return hvd.allreduce(tf.convert_to_tensor(tensor), op=hvd.Average, name="expected").numpy()


def gradients() -> dict[str, Any]:
    """Largest difference from the average of the ranks' gradients."""
    hvd.init()
    model, (x, y) = smooth_model(), shard(hvd.rank())
    variables = model.trainable_variables

    def taped(wrap: Any, **arguments: Any) -> Any:
        with wrap(tf.GradientTape(**arguments)) as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape, loss

    tape, loss = taped(lambda tape: tape)
    expected = [_mean(gradient) for gradient in tape.gradient(loss, variables)]
    choices = {
        "none": Compression.none,
        "predivide, groups": Compression.none,
        "topk, density 1": Compression.topk(1.0, **EVERYTHING),
        "topk, density 0.05": Compression.topk(0.05),
    }
    found: dict[str, Any] = {}
    for name, compression in choices.items():
        more = {"gradient_predivide_factor": 2.0, "groups": 2} if name.startswith("predivide") else {}

        def wrap(tape: Any, compression: Any = compression, more: Any = more) -> Any:
            return DistributedGradientTape(tape, compression=compression, **more)

        tape, loss = taped(wrap)
        found[name] = _difference(tape.gradient(loss, variables), expected)
    with DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
        twice = 2 * loss
    found["persistent"] = _difference(tape.gradient(loss, variables), expected)
    found["persistent, another target"] = _difference(tape.gradient(twice, variables), [2 * g for g in expected])
    tape, loss = taped(DistributedGradientTape)
    nested = tape.gradient(loss, {"first": variables[:2], "rest": (variables[2:],)})
    found["nested"] = _difference([*nested["first"], *nested["rest"][0]], expected)
    found["is a tape"] = isinstance(tape, tf.GradientTape)
    return found


def _difference(ours: Any, expected: Any) -> float:
    return max(float(np.abs(a.numpy() - b).max()) for a, b in zip(ours, expected, strict=True))


def in_graphs() -> dict[str, Any]:
    """A tape in a tf.function, its residual over steps: what was sent and what is kept is what was given."""
    hvd.init()
    model, (x, y) = smooth_model(), shard(hvd.rank())
    compression = Compression.topk(0.02, values="fp32", dense_values="fp32", seed=7)

    @tf.function
    def step(a: Any, b: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(a) - b) ** 2)
        return DistributedGradientTape(tape, compression=compression).gradient(loss, model.trainable_variables)

    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    expected = [_mean(gradient) for gradient in tape.gradient(loss, model.trainable_variables)]
    total = [np.zeros(g.shape, np.float64) for g in expected]
    steps = 150
    for _ in range(steps):
        for sum_, gradient in zip(total, step(x, y), strict=True):
            sum_ += gradient.numpy()
    first = step(x, y)
    return {
        "one step": _difference(first, expected),
        "on average": max(float(np.abs(t / steps - e).max()) for t, e in zip(total, expected, strict=True)),
        "largest": max(float(np.abs(e).max()) for e in expected),
        "sum": float(sum(np.abs(g.numpy()).sum() for g in first)),
    }


def first_step() -> dict[str, Any]:
    """Horovod's documented pattern: the first step, a tf.function, broadcasts the model, then the optimizer."""
    hvd.init()
    found: dict[str, Any] = {}
    none, topk = Compression.none, Compression.topk(0.05)
    for kind, compression in (("traced", none), ("branch", none), ("traced", topk), ("in place", topk)):
        model, (x, y) = smooth_model(seed=hvd.rank()), shard(hvd.rank())
        optimizer = keras.optimizers.Adam(1e-2 * (1 + hvd.rank()))

        @tf.function
        def step(a: Any, b: Any, first: Any, parts: Any = (compression, model, optimizer, kind)) -> None:
            compression, model, optimizer, kind = parts
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(a) - b) ** 2)
            tape = DistributedGradientTape(tape, compression=compression)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            if first:
                broadcast_variables(model.variables, 0, inplace=kind == "in place")
                broadcast_variables(optimizer.variables, 0, inplace=kind == "in place")

        for i, length in enumerate((16, 16, 8 + 8 * hvd.rank())):  # rank 0 alone traces its last batch anew
            step(x[:length], y[:length], tf.constant(i == 0) if kind == "branch" else i == 0)
        everything = [*model.variables, *optimizer.variables]
        found[f"{kind} {len(found)}"] = hashlib.sha256(b"".join(v.numpy().tobytes() for v in everything)).hexdigest()
    return found


def sparse_and_local() -> dict[str, Any]:
    """IndexedSlices with and without sparse_as_dense and compressed, with rows that repeat; local sources; NaN."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    table, weight = tf.Variable(tf.ones((6, 2))), tf.Variable(tf.ones((2, 3)))
    rows = [rank, rank, 5]

    def gradient(compression: Any, local: bool = False, scale: float = 1.0, **arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(tf.gather(table, rows) @ weight) * (rank + 1)
        tape = DistributedGradientTape(tape, compression=compression, **arguments)
        if local:
            tape.register_local_source(weight)
        return tape.gradient(loss, [table, weight])

    plain = gradient(Compression.none)
    dense = gradient(Compression.none, sparse_as_dense=True)
    packed = gradient(Compression.topk(1.0, **EVERYTHING))
    local = gradient(Compression.none, local=True)
    unscaled = gradient(Compression.none, local=True, scale_local_gradients=False)
    with messages() as texts:
        nan = gradient(Compression.topk(0.5, min_numel=1), scale=float("nan") if rank == 1 else 1.0)
    return {
        "sparse": isinstance(plain[0], tf.IndexedSlices),
        "rows": sorted(plain[0].indices.numpy().tolist()),
        "as dense": [tf.convert_to_tensor(g[0]).numpy().tolist() for g in (plain, dense, packed)],
        "kinds": [type(g[0]).__name__ == "IndexedSlices" for g in (dense, packed)],
        "local": [float(g[1].numpy().sum()) * (size if g is local else 1) for g in (local, unscaled)],
        "own": float(6.0 * 3 * (rank + 1)),
        "nan everywhere": bool(np.isnan(nan[1].numpy()).all()),
        "nan told": [text for text in texts if "not finite on rank 1" in text],
    }


def half_overflow() -> dict[str, Any]:
    """A float16 variable, whose gradients are finite, and whose updates leave float16's range."""
    hvd.init()
    weight, compression = tf.Variable(tf.zeros((40, 50), tf.float16)), Compression.topk(0.01)
    applied = []
    with messages() as texts:
        for step in range(40):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.cast(6e3 if step < 30 else 6e2, tf.float16))
            (gradient,) = DistributedGradientTape(tape, compression=compression).gradient(loss, [weight])
            assert not np.isinf(gradient.numpy()).any()
            applied.append(not np.isnan(gradient.numpy()).any())
    return {"applied": applied, "said": [text for text in texts if "large" in text or "finite" in text]}


def embedding() -> dict[str, Any]:
    """A Keras model with an Embedding, dense and compressed; a script of Horovod's that is refused."""
    hvd.init()
    found: dict[str, Any] = {}
    from dgc_horovod.tensorflow.keras import DistributedOptimizer
    from tests.helpers.keras_training import fingerprint

    tokens = np.random.default_rng(hvd.rank()).integers(0, 50, (64, 3))
    for name, compression in {"none": Compression.none, "dgc": Compression.dgc(0.05, min_numel=64)}.items():
        for make in (lambda: keras.optimizers.SGD(0.1, momentum=0.9), lambda: keras.optimizers.Adam(1e-2)):
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.layers.Input((3,), dtype="int32"), *layers])
            model.compile(DistributedOptimizer(make(), compression=compression), "mse")
            model.fit(tokens, np.ones((64, 1)), verbose=0, epochs=2)
            found[f"{name}, {type(model.optimizer).__name__}"] = fingerprint(model)
    found["errors"] = {
        "no tape": error_of(lambda: DistributedGradientTape("tape")),  # type: ignore[arg-type]
        "adasum": error_of(lambda: DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum)),
        "tf1": error_of(lambda: DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))),
        "stock function": error_of(lambda: hvd.allreduce(tf.ones(3), compression=Compression.dgc(), name="x")),
    }
    return found
