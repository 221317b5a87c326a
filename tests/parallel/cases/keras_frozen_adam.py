"""Keras' AdamW whose second moment is learnt in dense steps and stays, on real ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod import WarmupSchedule
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.keras.elastic import KerasState
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCHES, alone, fingerprint, fit, shard, smooth_model, weights
from tests.parallel.cases.keras_state import _remove, _shared_folder

EPOCHS, BETAS = 4, {"beta_1": 0.9, "beta_2": 0.95}  # dense epochs
DENSE = EPOCHS * BATCHES


def _adamw() -> Any:
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01, **BETAS)


def _optimizer(**fields: Any) -> Any:
    warmup = WarmupSchedule(steps=DENSE, first_density=1.0, factor=1e-3)
    settings = {"density": 0.05, "warmup": warmup, "values": "fp32", "dense_values": "fp32", **fields}
    return DistributedOptimizer(_adamw(), compression=Compression.dgc(**settings))


def _second(optimizer: Any) -> np.ndarray:
    (exchange,) = optimizer._dgc.exchanges
    engines = [run.engine for run in exchange.steps.runs if not run.engine.bucket.uncompressed]
    return np.concatenate([engine.state.moments[1] for engine in engines])


def dense_steps() -> dict[str, Any]:
    """The dense steps beside one process that sees everything; then what each rank has."""
    hvd.init()
    one, optimizer = weights(alone(_adamw(), EPOCHS)), _optimizer()
    model = fit(smooth_model(), optimizer, EPOCHS)
    ours = weights(model)
    losses = fit_more(model, 2 * EPOCHS)
    second = _second(optimizer)
    slots = np.concatenate([x.numpy().ravel() for x in optimizer._velocities if x.shape.rank == 2 and x.shape[-1] > 1])
    return {
        "apart": float(np.linalg.norm(ours - one) / np.linalg.norm(one)),
        "second": second.tobytes().hex()[:4096], "replica": fingerprint(model), "losses": losses,
        "slots": float(slots.sum() / np.sort(second).sum()),
    }  # fmt: skip


def fit_more(model: Any, epochs: int) -> list[float]:
    """The losses of more epochs."""
    x, y = shard(hvd.rank())
    return list(model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"])


def resume() -> dict[str, Any]:
    """Stopped in the dense steps, at their end, and after them."""
    hvd.init()
    found = {}
    whole = fit(smooth_model(), _optimizer(), EPOCHS + 3)
    for half in (EPOCHS - 1, EPOCHS, EPOCHS + 2):
        model = fit(smooth_model(), _optimizer(), half)
        folder = _shared_folder(f"frozen-{half}")
        save_checkpoint(folder, model)
        resumed, optimizer = smooth_model(5), _optimizer()
        load_checkpoint(folder, resumed, optimizer)
        fit(resumed, optimizer, EPOCHS + 3 - half)
        _remove(folder)
        found[str(half)] = [fingerprint(resumed), fingerprint(whole)]
    return found


def faults() -> dict[str, Any]:
    """A batch that is not finite at the end of the dense steps and at the first step after them; then a flush."""
    hvd.init()
    optimizer, model = _optimizer(), smooth_model()
    model.build((None, 32))
    optimizer.build(model.trainable_variables)
    x, y = (tf.constant(a) for a in shard(hvd.rank()))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    losses = []
    for i in range(DENSE + 10):
        at = 16 * (i % BATCHES)
        bad = float("nan") if hvd.rank() == 1 and i in (DENSE - 1, DENSE) else 1.0
        losses.append(float(step(bad * x[at : at + 16], y[at : at + 16])))
    second = _second(optimizer)
    before = fingerprint(model)
    optimizer.flush()
    flushed = fingerprint(model)
    for i in range(3):
        step(x[16 * i :][:16], y[16 * i :][:16])
    again = _second(optimizer)
    return {
        "before": before, "flushed": flushed, "after": fingerprint(model),
        "same": float(np.abs(again / second - 1).max()), "finite": bool(np.isfinite(weights(model)).all()),
    }  # fmt: skip


def handed_on() -> dict[str, Any]:
    """A record that was loaded and is saved again; elastic's state; then fewer variables, with the others' layer."""
    hvd.init()
    optimizer = _optimizer()
    model = fit(smooth_model(), optimizer, EPOCHS + 1)
    saved, at = model, optimizer
    for turn in range(2):
        folder, other, resumed = _shared_folder(f"handed-on-{turn}"), smooth_model(5), _optimizer()
        save_checkpoint(folder, saved, at)
        load_checkpoint(folder, other, resumed)
        _remove(folder)
        saved, at = other, resumed
    same = fingerprint(saved) == fingerprint(model)
    state = KerasState(model, optimizer)
    for act in (state.restore, state.save, state.restore, state.sync, state.sync, state.reset, state.sync):
        act()
    losses = fit_more(model, 1)
    x, y = (tf.constant(a) for a in shard(hvd.rank()))
    variables, moved = list(model.trainable_variables)[2:], 0.0
    for i in range(DENSE + 5):
        at, before = 16 * (i % BATCHES), variables[0].numpy()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[at : at + 16]) - y[at : at + 16]) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        moved = max(moved, float(np.abs(variables[0].numpy() - before).max()) / 1e-3)
    return {"same": same, "losses": [*losses, float(loss)], "moved": moved, "replica": fingerprint(model)}


def misuse() -> dict[str, str]:
    """Residuals without the optimizer's slots, and with the other second moment."""
    hvd.init()
    optimizer = _optimizer()
    fit(smooth_model(), optimizer, EPOCHS + 1)
    kept = optimizer.residual_state_dict()
    found = {}
    for name, fields in (("no state", {}), ("own", {"second_moment": "own"})):
        other = _optimizer(**fields)

        def go_on(other: Any = other) -> None:
            model = fit(smooth_model(), other, 0)
            other.build(model.trainable_variables)
            other.load_residual_state_dict(kept)
            fit_more(model, 1)

        found[name] = error_of(go_on)
    return found


def nodes() -> dict[str, Any]:
    """On two nodes of two."""
    hvd.init()
    one, optimizer = weights(alone(_adamw(), EPOCHS)), _optimizer(exchange="hierarchical")
    model = fit(smooth_model(), optimizer, EPOCHS)
    apart = float(np.linalg.norm(weights(model) - one) / np.linalg.norm(one))
    losses = fit_more(model, EPOCHS)
    return {"apart": apart, "kept": _second(optimizer).size, "replica": fingerprint(model), "losses": losses}


def settled() -> dict[str, Any]:
    """Dense steps that end once it has settled: the same as so many by number, also if interrupted; a commit."""
    hvd.init()
    longest, found = 3 * DENSE, {}
    waiting = {
        name: WarmupSchedule(steps=longest, first_density=1.0, factor=1e-3, until_settled=change)
        for name, change in (("some", 0.4), ("any", 1e9))
    }
    for name, warmup in waiting.items():
        optimizer = _optimizer(warmup=warmup)
        model = fit(smooth_model(), optimizer, 3 * EPOCHS + 2)
        found[name] = _settling(optimizer).settled_at
        found[f"{name}, replica"] = fingerprint(model)
    by_number = WarmupSchedule(steps=found["some"], first_density=1.0, factor=1e-3)
    found["by number"] = fingerprint(fit(smooth_model(), _optimizer(warmup=by_number), 3 * EPOCHS + 2))
    half, folder = found["some"] // BATCHES, _shared_folder("settled")
    save_checkpoint(folder, fit(smooth_model(), _optimizer(warmup=waiting["some"]), half))
    resumed, optimizer = smooth_model(5), _optimizer(warmup=waiting["some"])
    load_checkpoint(folder, resumed, optimizer)
    fit(resumed, optimizer, 3 * EPOCHS + 2 - half)
    _remove(folder)
    found["resumed"] = fingerprint(resumed)
    state = KerasState(resumed, optimizer)
    for act in (state.save, state.sync, state.restore, state.sync):
        act()
    found["synced"] = _settling(optimizer).settled_at
    return found


def _settling(optimizer: Any) -> Any:
    (exchange,) = optimizer._dgc.exchanges
    return exchange.steps.buckets.settling
