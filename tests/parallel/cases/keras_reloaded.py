"""Weights that are loaded in the middle of a run, and what is done before the next step; on real ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import broadcast_variables
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCH, fingerprint, momentum_sgd, shard, smooth_model, weights
from tests.helpers.logs import messages
from tests.parallel.cases.keras_state import _remove, _shared_folder

_SMALL: dict[str, Any] = {"density": 0.02, "min_numel": 16}
WAYS: dict[str, Any] = {
    "dgc": lambda: DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(**_SMALL)),
    "topk": lambda: DistributedOptimizer(momentum_sgd(), compression=Compression.topk(**_SMALL)),
    "adam": lambda: DistributedOptimizer(keras.optimizers.Adam(3e-3), compression=Compression.dgc(**_SMALL)),
    "scaled": lambda: DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(momentum_sgd()), compression=Compression.dgc(**_SMALL)
    ),
    "local": lambda: DistributedOptimizer(momentum_sgd(), compression=Compression.local(steps=4, density=0.1)),
}


def _trained(way: str, steps: int = 3) -> Any:
    model = smooth_model()
    model.compile(WAYS[way](), "mse")
    _train(model, steps)
    return model


def _train(model: Any, steps: int) -> None:
    x, y = shard(hvd.rank())
    for step in range(steps):
        at = BATCH * (step % 8)
        model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])


def _inner(model: Any) -> Any:
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def _slots(optimizer: Any) -> np.ndarray:
    return np.concatenate([slot.numpy().ravel() for slot in optimizer.variables if slot.shape.rank])


def _kept(optimizer: Any) -> float:
    """How much this rank has of gradients that the model has not had."""
    tensors = optimizer.residual_state_dict()["tensors"].values()
    return float(sum(np.abs(x).sum() for arrays in tensors for part, x in arrays.items() if part == "v"))


def between_steps() -> dict[str, Any]:
    """Between ``load_weights`` and the next step: what a file has, and how far a flush moves the weights."""
    hvd.init()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        file, whole = f"{folder}/of.weights.h5", f"{folder}/of.keras"
        for way in WAYS:
            model = _trained(way)
            model.save_weights(file)
            saved, velocity = weights(model), {}
            _inner(model).save_own_variables(velocity)
            if way == "local":  # the file of one rank
                saved = hvd.broadcast(tf.constant(saved), 0, name="saved").numpy()
            _train(model, 6)
            waited = _kept_of_any(model)
            model.load_weights(file)
            if way == "local":
                broadcast_variables(model.variables, 0)
            model.save(whole)
            of_file = _slots(_inner(keras.models.load_model(whole)))
            before = np.concatenate([x.ravel() for x in velocity.values() if np.ndim(x)])
            model.optimizer.flush()
            found[way] = {
                "waited": waited,
                "file": float(np.abs(of_file - before).max()),
                "moved": float(np.abs(weights(model) - saved).max()),
                "slots": float(np.abs(_slots(_inner(model)) - before).max()),
                "left": _kept(_inner(model)),
            }
            with messages() as said:
                _train(model, 1)
            found[way]["said"] = len([text for text in said if "checkpoint was loaded" in text])
            found[way]["after"] = fingerprint(model) if way != "local" else ""
    return found


def _kept_of_any(model: Any) -> float:
    if hasattr(_inner(model), "exchange"):  # of local steps it is known between two rounds
        _inner(model).exchange()
    return _kept(_inner(model))


def checkpointed() -> dict[str, Any]:
    """Weights are loaded, then a checkpoint of ours is saved; and loaded over what load_checkpoint has brought."""
    hvd.init()
    folder, found = _shared_folder("reloaded"), {}
    with tempfile.TemporaryDirectory() as own:
        file = f"{own}/of.weights.h5"
        model = _trained("dgc")
        model.save_weights(file)
        _train(model, 6)
        save_checkpoint(folder, model)
        waits = _kept(model.optimizer)
        model.load_weights(file)
        load_checkpoint(folder, model)  # brings its own
        found["brought"] = _kept(model.optimizer) / waits
        new = smooth_model(5)
        new.compile(WAYS["dgc"](), "mse")
        load_checkpoint(folder, new)
        new.load_weights(file)
        found["before the first step"] = _kept(new.optimizer)
        model.load_weights(file)
        _remove(folder)
        save_checkpoint(folder, model)
        resumed = smooth_model(5)
        resumed.compile(WAYS["dgc"](), "mse")
        load_checkpoint(folder, resumed)
        found["saved"] = _kept(resumed.optimizer)
        broadcast_variables(model.optimizer.variables, 0)  # the checkpoint has those of the first rank
        for each in (model, resumed):
            _train(each, 3)
        _remove(folder)
    found["alike"] = fingerprint(model) == fingerprint(resumed)
    return found


def one_rank() -> dict[str, Any]:
    """One rank alone loads, and sends weights and optimizer to the others; then a flush, and on."""
    hvd.init()
    model = _trained("dgc")
    saved = weights(model)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "of.weights.h5"))
        model.save_weights(file)
        _train(model, 6)
        if hvd.rank() == 0:
            model.load_weights(file)
    for variables in (model.variables, model.optimizer.variables):
        broadcast_variables(variables, 0)
    error = error_of(model.optimizer.flush)
    moved = float(np.abs(weights(model) - saved).max())
    _train(model, 3)
    return {"error": error, "moved": moved, "after": fingerprint(model)}


def set_weights() -> dict[str, Any]:
    """``optimizer.set_weights``: slots of ones are taken over at the next step, and what waited is gone."""
    hvd.init()
    found = {}
    for way in ("dgc", "adam", "scaled", "local"):
        model = _trained(way, 4)
        optimizer = _inner(model)
        values = [np.ones_like(v) if v.ndim == 2 else v for v in (each.numpy() for each in optimizer.variables)]
        if way == "scaled":
            model.optimizer.set_weights([each.numpy() for each in model.optimizer.variables])
        optimizer.set_weights(values)
        left = _kept(optimizer)
        slots = {}
        optimizer.save_own_variables(slots)
        same = all(np.array_equal(slots[str(i)], value) for i, value in enumerate(values))
        _train(model, 1)
        kernels = [slot.numpy() for slot in optimizer.variables if slot.shape.rank == 2 and slot.shape[1] > 1]
        found[way] = {"left": left, "same": same, "slots": float(sum(np.abs(kernel).sum() for kernel in kernels))}
    return found


def back_by_one() -> dict[str, Any]:
    """Weights and iterations of one step ago are assigned: how far they move then, and what is said."""
    hvd.init()
    found: dict[str, Any] = {}
    draws = np.random.default_rng(hvd.rank())
    for way in ("dgc", "topk", "adam", "auto"):
        variable = tf.Variable(tf.zeros((40, 50)))
        compression = Compression.auto() if way == "auto" else None
        optimizer = DistributedOptimizer(momentum_sgd(), compression=compression) if compression else WAYS[way]()
        apply = tf.function(lambda gradient, of=variable, by=optimizer: by.apply([gradient], [of]))
        with messages() as said:
            for _ in range(3):
                apply(tf.constant(draws.standard_normal((40, 50)), tf.float32))
            early = [text for text in said if "checkpoint was loaded" in text]
            at, iterations = variable.numpy(), optimizer.iterations.numpy()
            apply(tf.constant(draws.standard_normal((40, 50)), tf.float32))
            variable.assign(at)
            optimizer.iterations.assign(iterations)
            if way != "auto":
                apply(tf.zeros((40, 50)))
        later = [text for text in said if "checkpoint was loaded" in text]
        found[way] = [float(np.abs(variable.numpy() - at).max()), len(early), len(later)]
    return found
