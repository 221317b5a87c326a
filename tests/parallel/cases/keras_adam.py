"""Keras' Adam and AdamW over a second moment that all ranks share, on real ranks."""

from __future__ import annotations

import hashlib
import tempfile
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod import WarmupSchedule
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.keras.elastic import KerasState
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import BATCHES, alone, fingerprint, fit, shard, smooth_model, weights
from tests.parallel.cases.keras_state import _remove, _shared_folder

EPOCHS = 2  # dense ones, where there are some
BETAS = {"beta_1": 0.9, "beta_2": 0.95}


def _adamw() -> Any:
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01, **BETAS)


def _optimizer(dense: bool = False, inner: Any = None, **fields: Any) -> Any:
    warmup = WarmupSchedule(steps=EPOCHS * BATCHES, first_density=1.0, factor=1e-3) if dense else None
    settings = {"density": 0.05, "warmup": warmup, "values": "fp32", "dense_values": "fp32", **fields}
    return DistributedOptimizer(inner or _adamw(), compression=Compression.dgc(**settings))


def _second(optimizer: Any) -> np.ndarray:
    return session(optimizer).buckets.second.packed()


def _print(optimizer: Any) -> str:
    return hashlib.sha256(_second(optimizer).tobytes()).hexdigest()


def _epochs(model: Any, epochs: int) -> list[float]:
    """The losses of more epochs."""
    x, y = shard(hvd.rank())
    return list(model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"])


def _compressed_slots(optimizer: Any, slots: list[Any]) -> np.ndarray:
    """Slots of the variables that are compressed, as one vector."""
    return np.concatenate([np.asarray(x).ravel() for x in slots if np.ndim(x) == 2 and np.shape(x)[-1] > 1])


def shared() -> dict[str, Any]:
    """Compressed from the first step: replicas, a Keras file, a flush, a step that is not finite."""
    hvd.init()
    model = fit(smooth_model(), _optimizer(), 1)
    losses, replicas = [], []
    for _ in range(4):
        losses += _epochs(model, 1)
        replicas.append(fingerprint(model))
    optimizer, found = model.optimizer, {"losses": losses}
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/of.keras")
        plain = keras.models.load_model(f"{folder}/of.keras")
    inside = _compressed_slots(plain.optimizer, plain.optimizer._velocities)
    found["file"] = [type(plain.optimizer) is keras.optimizers.AdamW, int(plain.optimizer.iterations)]
    found["file, momentum"] = float(np.abs(_compressed_slots(plain.optimizer, plain.optimizer._momentums)).max())
    found["goes on"] = [losses[-1], _epochs(plain, 2)[-1]]

    x, y = (tf.constant(a) for a in shard(hvd.rank()))
    before, second, bad = fingerprint(model), _second(optimizer), float("nan") if hvd.rank() == 1 else 1.0
    with tf.GradientTape() as tape:
        loss = bad * tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    found["skipped"] = [fingerprint(model) == before, bool(np.array_equal(_second(optimizer), second))]

    optimizer.flush()
    tensors = optimizer.residual_state_dict()["tensors"].values()
    found["left"] = float(sum(np.abs(x).sum() for arrays in tensors for x in arrays.values()))
    found["flushed"] = [bool(_second(optimizer).any()), before != fingerprint(model)]
    found["slots"] = [
        float(np.abs(_compressed_slots(optimizer, optimizer._momentums)).max()),
        float(np.abs(_compressed_slots(optimizer, optimizer._velocities) / inside - 1).max()),
    ]
    found["after"] = [*_epochs(model, 2), float(np.abs(_compressed_slots(optimizer, optimizer._velocities)).max())]
    return {**found, "replicas": [*replicas, fingerprint(model)], "second": _print(optimizer)}


def dense_steps() -> dict[str, Any]:
    """Dense steps beside one process that sees everything; then compressed ones, which take over what is learnt."""
    hvd.init()
    one, model = alone(_adamw(), EPOCHS), fit(smooth_model(), _optimizer(dense=True), EPOCHS)
    ours, theirs = weights(model), weights(one)
    optimizer = model.optimizer
    found: dict[str, Any] = {"apart": float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))}
    velocity = _compressed_slots(optimizer, optimizer._velocities)
    found["known"] = [bool(_second(optimizer).any())]
    losses = _epochs(model, 1)
    found["known"].append(bool(_second(optimizer).any()))
    found["emptied"] = float(np.abs(_compressed_slots(optimizer, optimizer._velocities)).max())
    buckets = session(optimizer).buckets
    squares = np.concatenate([buckets.second[name].square() for name in buckets.compressed])
    found["ratio"] = float(squares.sum() / velocity.sum())
    found["losses"] = [*losses, *_epochs(model, 2)]
    stock = _optimizer(inner=one.optimizer)  # a stock optimizer goes on compressed
    one.compile(stock, "mse")
    found["stock"] = [*_epochs(one, 2), float(np.abs(_compressed_slots(stock, stock._velocities)).max())]
    return {**found, "replica": [fingerprint(model), fingerprint(one)]}


def resumed() -> dict[str, Any]:
    """Stopped in the dense steps, at their end, and after them; a record beside a Keras file."""
    hvd.init()
    found: dict[str, Any] = {}
    whole = fit(smooth_model(), _optimizer(dense=True), EPOCHS + 2)
    for half in (EPOCHS - 1, EPOCHS, EPOCHS + 1):
        model = fit(smooth_model(), _optimizer(dense=True), half)
        folder = _shared_folder(f"adam-{half}")
        save_checkpoint(folder, model)
        other, optimizer = smooth_model(5), _optimizer(dense=True)
        load_checkpoint(folder, other, optimizer)
        fit(other, optimizer, EPOCHS + 2 - half)
        _remove(folder)
        found[str(half)] = [fingerprint(other), fingerprint(whole)]
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/of.keras")
        record = model.optimizer.residual_state_dict()
        other = keras.models.load_model(f"{folder}/of.keras")
    optimizer = _optimizer(dense=True, inner=other.optimizer)
    optimizer.load_residual_state_dict(record)
    fit(other, optimizer, 1)
    found["file"] = [fingerprint(other), fingerprint(whole)]
    return found


def handed_on() -> dict[str, Any]:
    """Elastic's state, where one rank knows nothing; then fewer variables; and a checkpoint of which a file is lost."""
    hvd.init()
    model = fit(smooth_model(), _optimizer(), 2)
    optimizer = model.optimizer
    state = KerasState(model, optimizer)
    for act in (state.restore, state.save, state.restore, state.sync):
        act()
    if hvd.rank() == 1:  # as a newcomer
        session(optimizer).buckets.clear()
    for act in (state.sync, state.reset, state.sync):
        act()
    found: dict[str, Any] = {"second": [_print(optimizer)]}
    losses = _epochs(model, 2)
    folder = _shared_folder("adam-lost")
    save_checkpoint(folder, model)
    if hvd.rank() == 1:
        next(folder.glob("*rank1.npz")).unlink()
    other, resumed = smooth_model(5), _optimizer()
    load_checkpoint(folder, other, resumed, residuals="if sound")
    _remove(folder)
    fit(other, resumed, 1)
    found["second"].append(_print(resumed))
    x, y = (tf.constant(a) for a in shard(hvd.rank()))
    variables, moved = list(model.trainable_variables)[2:], 0.0
    for i in range(10):
        at, was = 16 * (i % BATCHES), variables[0].numpy()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[at : at + 16]) - y[at : at + 16]) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        moved = max(moved, float(np.abs(variables[0].numpy() - was).max()) / 1e-3)
    found["replicas"] = [fingerprint(model), fingerprint(other)]
    return {**found, "losses": [*losses, float(loss)], "moved": moved}
