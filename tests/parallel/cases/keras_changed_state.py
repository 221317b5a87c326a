"""Checkpoints of a Keras job that is another one now, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fingerprint
from tests.helpers.sealed import OF_KERAS, outcomes
from tests.parallel.cases.keras_state import _SMALL, _remove, _shared_folder

DGC = Compression.dgc(**_SMALL)


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


def refused() -> dict[str, Any]:
    """Another layer of the same shape is frozen, nothing is compressed: nothing has changed."""
    hvd.init()
    pairs = {
        "other layer": (_made(DGC, 0), _made(DGC, 1)),
        "Adam": (_made(DGC, 0, adam=True), _made(DGC, 1, adam=True)),
        "uncompressed": (_made(DGC), _made(Compression.none)),
        "after steps": (_made(DGC, 1), _train(_made(DGC, 0), 0, 2)),
    }
    found = {}
    for number, (name, (model, other)) in enumerate(pairs.items()):
        folder = _shared_folder(f"refused{number}")
        save_checkpoint(folder, _train(model, 0, 6))
        for weight in other.layers[2].weights:  # to see whether a load that is refused has changed them
            weight.assign(weight + 1)
        before = fingerprint(other)
        error = error_of(lambda: load_checkpoint(folder, other))  # noqa: B023 - called at once
        same = fingerprint(other) == before
        model.optimizer.flush()
        save_checkpoint(folder, model)
        flushed = error_of(lambda: load_checkpoint(folder, other))  # noqa: B023 - called at once
        found[name] = {"error": error, "same": same, "flushed": flushed}
        found[name]["weights"] = fingerprint(other) == fingerprint(model)
        _remove(folder)
    kept = _train(_made(Compression.topk(**_SMALL)), 0, 3).optimizer.residual_state_dict()
    found["method"] = {
        name: error_of(lambda: _train(_made(c), 0, steps).optimizer.load_residual_state_dict(kept))  # noqa: B023
        for name, c, steps in (("dgc", DGC, 0), ("dgc, trained", DGC, 2), ("local", Compression.local(steps=2), 0))
    }
    return found


def sealed() -> dict[str, Any]:
    """Files that somebody has changed and sealed again: one error on every rank, and nothing has changed."""
    hvd.init()
    model, folder = _train(_made(DGC), 0, 4), _shared_folder("sealed")
    save_checkpoint(folder, model)
    _train(model, 4, 6)

    def kept() -> str:
        slots = [np.asarray(variable).tolist() for variable in model.optimizer.variables]
        residuals = model.optimizer.residual_state_dict()["tensors"]
        return str([fingerprint(model), slots, {n: [x.tolist() for x in a.values()] for n, a in residuals.items()}])

    found = outcomes(
        OF_KERAS, Path(folder), hvd.rank() == 0, lambda: hvd.allreduce(tf.zeros(1), name="sealed"),
        lambda: error_of(lambda: load_checkpoint(folder, model)), kept,
    )  # fmt: skip
    _remove(folder)
    return found


def within_an_accumulation() -> dict[str, Any]:
    """Loaded in the middle of one: what was accumulated is of other weights."""
    hvd.init()
    folder = _shared_folder("accumulated")
    whole = _train(_made(DGC, passes=2), 0, 8)
    save_checkpoint(folder, whole)
    again = _train(_made(DGC, passes=2), 0, 11)
    load_checkpoint(folder, again)
    found = {"same": fingerprint(_train(again, 8, 12)) == fingerprint(_train(whole, 8, 12))}
    _remove(folder)
    return found


def outer_momentum() -> dict[str, Any]:
    """From an exchange at every step to local steps, back, and to no outer momentum."""
    hvd.init()
    makes = {
        "each": lambda: _made(Compression.topk(**_SMALL)),
        "local": lambda: _made(Compression.local(steps=2, min_numel=16)),
        "plain": lambda: _made(Compression.local(steps=2, min_numel=16, outer_momentum=0.0)),
    }
    found = {}
    for number, (one, other) in enumerate(
        (("each", "local"), ("local", "each"), ("local", "plain"), ("plain", "local"))
    ):
        folder = _shared_folder(f"outer{number}")
        model, loaded = _train(makes[one](), 0, 4), _train(makes[other](), 0, 4)
        save_checkpoint(folder, model)
        load_checkpoint(folder, loaded, residuals="required" if "each" not in (one, other) else "ignored")
        outer = [] if other == "each" else session(loaded.optimizer).rounds.outer
        found[f"{one}, {other}"] = [
            fingerprint(loaded) == fingerprint(model),
            bool(outer) == (other == "local"),
            not any(np.any(each.numpy()) for each in outer),
        ]
        _train(loaded, 4, 6)
        _remove(folder)
    return found
