"""A checkpoint of a Keras job that is another one now: refused before anything is changed, or loaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fingerprint, keras
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
SMALL: dict[str, Any] = {"density": 0.02, "min_numel": 16, "bucket_bytes": 12_000}
DGC, TOPK = Compression.dgc(**SMALL), Compression.topk(**SMALL)
FROZEN = "a layer was frozen or thawed since they were saved"


def _made(compression: Any, frozen: int | None = None, adam: bool = False, passes: int | None = None) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(10, activation="tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((10,)), *layers])
    if frozen is not None:
        model.layers[frozen].trainable = False
    more = {"gradient_accumulation_steps": passes}
    inner = keras.optimizers.AdamW(0.003, **more) if adam else keras.optimizers.SGD(0.05, momentum=0.9, **more)
    optimizer = DistributedOptimizer(inner, compression=compression)
    model.compile(optimizer, loss="mse", run_eagerly=True)
    optimizer.build(model.trainable_variables)
    return model


def _train(model: Any, first: int, last: int) -> Any:
    for step in range(first, last):
        rng = np.random.default_rng(100 * step + hvd.rank())
        x, y = rng.normal(size=(2, 8, 10)).astype("f4")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model


REFUSED: dict[str, Any] = {  # a model that is saved, one that its checkpoint does not fit, and what is said
    "other layer": (lambda: _made(DGC, 0), lambda: _made(DGC, 1), FROZEN),
    "Adam": (lambda: _made(DGC, 0, adam=True), lambda: _made(DGC, 1, adam=True), FROZEN),
    "uncompressed": (
        lambda: _made(DGC),
        lambda: _made(Compression.none),
        "nothing is compressed now: flush() before saving",
    ),
    "after steps": (
        lambda: _made(DGC, 1),
        lambda: _train(_made(DGC, 0), 0, 2),
        "those of model.weights at 0, 1, 4, 5 were trained, now those at 2, 3, 4, 5",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing_and_is_loaded_behind_a_flush(case, tmp_path):
    """Another layer of the same shape is frozen, or nothing is compressed."""
    saved, loaded, words = REFUSED[case]
    model, other = saved(), loaded()
    save_checkpoint(tmp_path, _train(model, 0, 6))
    for weight in other.layers[2].weights:  # to see whether a load that is refused has changed them
        weight.assign(weight + 1)
    before = fingerprint(other)
    error = error_of(lambda: load_checkpoint(tmp_path, other))
    assert words in error and fingerprint(other) == before
    model.optimizer.flush()
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, other)
    assert fingerprint(other) == fingerprint(model)
    same_on_ranks(error)


def test_a_load_within_an_accumulation_begins_it_anew(tmp_path):
    """What was accumulated is of other weights."""
    whole = _train(_made(DGC, passes=2), 0, 8)
    save_checkpoint(tmp_path, whole)
    again = _train(_made(DGC, passes=2), 0, 11)
    load_checkpoint(tmp_path, again)
    assert fingerprint(_train(again, 8, 12)) == fingerprint(_train(whole, 8, 12))


MAKES = {
    "each": lambda: _made(TOPK),
    "local": lambda: _made(Compression.local(steps=2, min_numel=16)),
    "plain": lambda: _made(Compression.local(steps=2, min_numel=16, outer_momentum=0.0)),
}


@pytest.mark.parametrize(("one", "other"), [pair for pair in itertools.permutations(MAKES, 2) if "local" in pair])
def test_outer_momentum_may_come_and_go(one, other, tmp_path):
    """From an exchange at every step to local steps, back, and to no outer momentum."""
    model, loaded = _train(MAKES[one](), 0, 4), _train(MAKES[other](), 0, 4)
    save_checkpoint(tmp_path, model)
    load_checkpoint(tmp_path, loaded, residuals="required" if "each" not in (one, other) else "ignored")
    outer = [] if other == "each" else session(loaded.optimizer).rounds.outer
    assert fingerprint(loaded) == fingerprint(model)
    assert bool(outer) == (other == "local") and not any(np.any(each.numpy()) for each in outer)
    _train(loaded, 4, 6)
