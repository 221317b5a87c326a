"""``DistributedGradientTape`` on real ranks: dense, compressed, persistent, nested, sparse, local."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedGradientTape, broadcast_variables
from dgc_horovod.tensorflow.keras import DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fingerprint, gradients_of, keras, loss_of, momentum_sgd, shard, smooth_model
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import EVERYTHING

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {"compression": Compression.none},
    "predivide, groups": {"compression": Compression.none, "gradient_predivide_factor": 2.0, "groups": 2},
    "topk, density 1": {"compression": Compression.topk(1.0, **EVERYTHING)},
    "topk, density 0.05": {"compression": Compression.topk(0.05)},
}


def _task() -> tuple[Any, Any, Any, list[np.ndarray]]:
    """Model, data, and the average of the ranks' gradients."""
    model, (x, y) = smooth_model(), shard(hvd.rank())
    average = [hvd.allreduce(each, op=hvd.Average, name="expected").numpy() for each in gradients_of(model, x, y)]
    return model, x, y, average


def _difference(ours: Any, expected: Any) -> float:
    return max(float(np.abs(a.numpy() - b).max()) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_gradients_are_the_average(name):
    model, x, y, expected = _task()
    with DistributedGradientTape(tf.GradientTape(), **ARGUMENTS[name]) as tape:
        loss = loss_of(model, x, y)
    difference = _difference(tape.gradient(loss, model.trainable_variables), expected)
    if name == "topk, density 0.05":
        assert difference > 1e-3, "a compressed gradient equals the dense one"
    else:
        assert difference < 1e-6


def test_persistent_tapes_and_nested_sources():
    model, x, y, expected = _task()
    variables = model.trainable_variables
    with DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = loss_of(model, x, y)
        twice = 2 * loss
    assert _difference(tape.gradient(loss, variables), expected) < 1e-6
    assert _difference(tape.gradient(twice, variables), [2 * each for each in expected]) < 1e-6
    with DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(model, x, y)
    nested = tape.gradient(loss, {"first": variables[:2], "rest": (variables[2:],)})
    assert _difference([*nested["first"], *nested["rest"][0]], expected) < 1e-6
    assert isinstance(tape, tf.GradientTape)


def test_what_a_tape_does_not_send_comes_later():
    """In a tf.function: what was sent and what is kept is what was given."""
    model, x, y, expected = _task()
    compression = Compression.topk(0.02, values="fp32", dense_values="fp32", seed=7)
    step = tf.function(
        lambda a, b: gradients_of(model, a, b, lambda tape: DistributedGradientTape(tape, compression=compression))
    )
    total, steps = [np.zeros(each.shape, np.float64) for each in expected], 150
    for _ in range(steps):
        for sum_, gradient in zip(total, step(x, y), strict=True):
            sum_ += gradient.numpy()
    one = step(x, y)
    largest = max(float(np.abs(each).max()) for each in expected)
    assert _difference(one, expected) > 0.05 * largest
    assert max(float(np.abs(t / steps - e).max()) for t, e in zip(total, expected, strict=True)) < 0.4 * largest
    same_on_ranks(float(sum(np.abs(each.numpy()).sum() for each in one)))


def _after_first_steps(kind: str, compression: Any) -> str:
    """Hash of all variables after Horovod's documented pattern: the first step broadcasts model, then optimizer."""
    model, (x, y) = smooth_model(seed=hvd.rank()), shard(hvd.rank())
    optimizer = keras.optimizers.Adam(1e-2 * (1 + hvd.rank()))

    @tf.function
    def step(a: Any, b: Any, first: Any) -> None:
        gradients = gradients_of(model, a, b, lambda tape: DistributedGradientTape(tape, compression=compression))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first:
            broadcast_variables(model.variables, 0, inplace=kind == "in place")
            broadcast_variables(optimizer.variables, 0, inplace=kind == "in place")

    for i, length in enumerate((16, 16, 8 + 8 * hvd.rank())):  # rank 0 alone traces its last batch anew
        step(x[:length], y[:length], tf.constant(i == 0) if kind == "branch" else i == 0)
    everything = [*model.variables, *optimizer.variables]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in everything)).hexdigest()


@pytest.mark.on_ranks(2, fresh=True)
def test_two_broadcasts_in_the_first_step():
    """Their tensors had the same names, and a rank that traced once more than the others waited for them."""
    hvd.init()
    none, topk = Compression.none, Compression.topk(0.05)
    for kind, compression in (("traced", none), ("branch", none), ("traced", topk), ("in place", topk)):
        same_on_ranks(_after_first_steps(kind, compression))


def test_sparse_and_local_sources():
    """IndexedSlices with and without sparse_as_dense and compressed, with rows that repeat; local sources; NaN."""
    rank, size = hvd.rank(), hvd.size()
    table, weight = tf.Variable(tf.ones((6, 2))), tf.Variable(tf.ones((2, 3)))
    rows = [rank, rank, 5]

    def gradient(compression: Any = Compression.none, local: bool = False, scale: float = 1.0, **arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(tf.gather(table, rows) @ weight) * (rank + 1)
        tape = DistributedGradientTape(tape, compression=compression, **arguments)
        if local:
            tape.register_local_source(weight)
        return tape.gradient(loss, [table, weight])

    sparse, dense = gradient()[0], [[3.0, 3.0], [6.0, 6.0], *[[0.0, 0.0]] * 3, [4.5, 4.5]]
    assert isinstance(sparse, tf.IndexedSlices)
    assert sorted(sparse.indices.numpy().tolist()) == [0, 1, 5], "rows that repeat are added up"
    assert tf.convert_to_tensor(sparse).numpy().tolist() == dense
    for packed in (gradient(sparse_as_dense=True)[0], gradient(Compression.topk(1.0, **EVERYTHING))[0]):
        assert not isinstance(packed, tf.IndexedSlices) and packed.numpy().tolist() == dense
    own = 18 * (rank + 1)
    assert float(gradient(local=True)[1].numpy().sum()) * size == own
    assert float(gradient(local=True, scale_local_gradients=False)[1].numpy().sum()) == own
    with messages() as texts:
        nan = gradient(Compression.topk(0.5, min_numel=1), scale=float("nan") if rank == 1 else 1.0)
    assert np.isnan(nan[1].numpy()).all()
    told = [text for text in texts if "not finite on rank 1" in text]
    assert len(told) == (rank == 0)
    assert all("a tape applies nothing: it returns NaN, on every rank" in text for text in told)


def test_half_precision_overflow_is_skipped():
    """Infinite updates were handed out: gradients are finite, and the updates of a float16 variable were not."""
    weight, compression = tf.Variable(tf.zeros((40, 50), tf.float16)), Compression.topk(0.01)
    applied = []
    with messages() as texts:
        for step in range(40):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * tf.cast(6e3 if step < 30 else 6e2, tf.float16))
            (gradient,) = DistributedGradientTape(tape, compression=compression).gradient(loss, [weight])
            assert not np.isinf(gradient.numpy()).any()
            applied.append(not np.isnan(gradient.numpy()).any())
    same_on_ranks(applied)
    assert not all(applied[:30]) and all(applied[-10:])
    said = [text for text in texts if "large" in text or "finite" in text]
    assert len(said) == (hvd.rank() == 0) and all("an update was too large" in text for text in said)


def test_embeddings():
    tokens = np.random.default_rng(hvd.rank()).integers(0, 50, (64, 3))
    found = []
    for compression in (Compression.none, Compression.dgc(0.05, min_numel=64)):
        for stock in (momentum_sgd(learning_rate=0.1), keras.optimizers.Adam(1e-2)):
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.layers.Input((3,), dtype="int32"), *layers])
            model.compile(DistributedOptimizer(stock, compression=compression), "mse")
            model.fit(tokens, np.ones((64, 1)), verbose=0, epochs=2)
            found.append(fingerprint(model))
    assert len(set(found)) == 4
    same_on_ranks(found)


REFUSED: dict[str, Callable[[], Any]] = {
    "must be a tf.GradientTape": lambda: DistributedGradientTape("tape"),  # type: ignore[arg-type]
    "op must be hvd.Average or hvd.Sum": lambda: DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum),
    "^UnsupportedUse.*TensorFlow 1 and of Keras 2": lambda: DistributedOptimizer(
        tf.compat.v1.train.GradientDescentOptimizer(0.1)
    ),
    "from dgc_horovod.tensorflow import DistributedOptimizer": lambda: hvd.allreduce(
        tf.ones(3), compression=Compression.dgc(), name="x"
    ),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_refused(told):
    error = error_of(REFUSED[told])
    assert re.search(told, error)
    same_on_ranks(error)
