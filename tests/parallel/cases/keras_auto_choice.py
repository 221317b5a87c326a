"""What Compression.auto chooses in Keras, and what ends a trial without a choice, on real ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.planning.trial import COMPRESSED, DENSE, MOST_TIMED, SETTLING
from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, callbacks, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_told, stay_away
from tests.helpers.keras_training import BATCHES, fingerprint, fit, momentum_sgd, smooth_model, weights
from tests.parallel.cases.keras_auto import OPTIMIZERS, UNROUNDED, adamw, made, take, train
from tests.parallel.cases.keras_state import _remove, _shared_folder


def early() -> dict[str, Any]:
    """A checkpoint from before the first step: the choice is still to be made."""
    hvd.init()
    model, folder = smooth_model(), _shared_folder("auto-early")
    optimizer = DistributedOptimizer(adamw(), compression=Compression.auto(min_numel=16))
    save_checkpoint(folder, model, optimizer)
    other = smooth_model(5)
    resumed = DistributedOptimizer(adamw(), compression=Compression.auto(min_numel=16))
    load_checkpoint(folder, other, resumed)
    _remove(folder)
    prints = train(other, resumed, 3)
    trial = session(resumed).choice.trial
    return {"mode": [trial.mode, trial.ended], "prints": prints}


def choosing() -> dict[str, Any]:
    """A choice by the clock: the same on every rank, and the one that the times say."""
    model, optimizer = made(mode=None, density=0.01)
    choice, modes = session(optimizer).choice, []
    exchange = session(optimizer).exchange
    prints = train(model, optimizer, 4 * (SETTLING + MOST_TIMED), lambda step: modes.append(exchange.steps.counts.mode))
    return {
        "modes": modes[1:], "prints": prints, "ended": choice.trial.ended, "seconds": choice.trial.seconds,
        "steps": exchange.steps.buckets.steps, "stats": optimizer.compression_stats()["steps"],
        "mode": choice.trial.mode,
    }  # fmt: skip


def undecided() -> dict[str, Any]:
    """Saved in the middle of a trial: it begins anew, with all that was kept; a stock file of it is whole."""
    model, optimizer = made(mode=None, **UNROUNDED)
    session(optimizer).choice.trial.dense_timed(1.0, 0.1)
    train(model, optimizer, 4)
    handed_over = _handed_over(optimizer)
    folder = _shared_folder("auto-undecided")
    save_checkpoint(folder, model, optimizer)
    other, resumed = made(mode=None, **UNROUNDED)
    load_checkpoint(folder, other, resumed)
    _remove(folder)
    prints = train(other, resumed, 3, first=4)
    choice = session(resumed).choice
    take(optimizer, DENSE)
    theirs = train(model, optimizer, 3, first=4)
    return {
        "mode": [choice.trial.mode, choice.trial.ended], "same": prints == theirs, "prints": prints,
        "slots": handed_over, "later": not _handed_over(optimizer),
    }  # fmt: skip


def _handed_over(optimizer: Any) -> bool:
    """Whether a saved optimizer has momentum that its own slots do not have."""
    saved: dict[str, Any] = {}
    optimizer.save_own_variables(saved)
    return any(bool(np.any(saved[str(i)] != x.numpy())) for i, x in enumerate(optimizer.variables))


def lost() -> dict[str, Any]:
    """A rank's file is lost: it goes on without, and does what the others do."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model, optimizer = made(make, mode=None, density=0.1)
        train(model, optimizer, 4)
        take(optimizer, COMPRESSED)
        train(model, optimizer, 4, first=4)
        session(optimizer).choice.trial.ended = False  # so that the choice is to be made again
        folder = _shared_folder(f"auto-lost-{name}")
        save_checkpoint(folder, model, optimizer)
        if hvd.rank() == 1:
            next(folder.glob("*rank1.npz")).unlink()
        other, resumed = made(make, mode=None, density=0.1)
        load_checkpoint(folder, other, resumed, residuals="if sound")
        _remove(folder)
        found[name] = train(other, resumed, 3, first=8)
    return found


def given_up() -> dict[str, Any]:
    """Other variables in mid-run end a trial without a choice; stock Horovod's exchange stays."""
    found: dict[str, Any] = {}
    for name in ("SGD", "AdamW"):
        model, optimizer = made(OPTIMIZERS[name])
        train(model, optimizer, 4, lambda step, optimizer=optimizer: take(optimizer, COMPRESSED if step else DENSE))
        variables = model.trainable_variables[2:]
        kept = optimizer.residual_state_dict()["tensors"]
        own = sum(float(abs(x).sum()) for i, each in kept.items() if int(i) > 1 for x in each.values())
        before = fingerprint(model)
        optimizer.apply([tf.zeros(v.shape) for v in variables], variables)  # a layer is frozen, as it were
        moved = before != fingerprint(model)
        path = variables[0].path.replace("/", "_")
        slots = float(sum(np.abs(slot.numpy()).sum() for slot in optimizer.variables if path in slot.path))
        train(model, optimizer, 3, first=4)
        found[f"several, {name}"] = [own > 0, moved, slots > 0]
        found[f"several, {name}, modes"] = [each.choice.trial.mode for each in session(optimizer).exchanges]
        found[f"several, {name}, prints"] = fingerprint(model)
        found[f"several, {name}, finite"] = bool(np.isfinite(weights(model)).all())
    return found


def beside() -> dict[str, Any]:
    """What compression cannot do, and a job that may have stock Horovod need not stop for."""
    hvd.init()
    found: dict[str, Any] = {}
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Embedding(50, 8), keras.layers.Dense(40)])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=Compression.auto(min_numel=16))
    for i in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant([[i, i + 1, hvd.rank()]])) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    found["sparse"] = [session(optimizer).settings.config is None, fingerprint(model)]
    amsgrad = DistributedOptimizer(keras.optimizers.Adam(amsgrad=True), compression=Compression.auto(min_numel=16))
    found["amsgrad"] = [session(amsgrad).settings.config is None, fingerprint(fit(smooth_model(), amsgrad, 1))]
    model = smooth_model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((4, 32))) ** 2) * (1 + hvd.rank())
    tape = DistributedGradientTape(tape, compression=Compression.auto())
    found["tape"] = float(tape.gradient(loss, model.trainable_variables)[0].numpy().sum())
    return found


def fit_tells() -> dict[str, Any]:
    """``fit`` knows the number of steps, from which the density follows."""
    hvd.init()
    found = {}
    for epochs in (2, 500):
        model, optimizer = (
            smooth_model(),
            DistributedOptimizer(momentum_sgd(), compression=Compression.auto(min_numel=16)),
        )

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.model.stop_training = True

        fit(model, optimizer, epochs, [callbacks.BroadcastGlobalVariablesCallback(0), Stop()])
        config = session(optimizer).settings.config
        found[str(epochs * BATCHES)] = [config.total_steps, config.density, session(optimizer).choice.trial.ended]
    return found


def uneven() -> dict[str, Any]:
    """Ranks that run out of data before a choice; then one that stays away, of which the others tell in time."""
    model, optimizer = made(mode=None)
    train(model, optimizer, 10 + 30 * hvd.rank())  # the other rank comes to its comparison alone
    hvd.join()
    trial = session(optimizer).choice.trial
    found: dict[str, Any] = {"join": [trial.mode, trial.ended]}
    model, optimizer = made(mode=None)  # hvd.init() again: its shutdown at exit must not meet ours all the same
    train(model, optimizer, 3)
    session(optimizer).choice.trial.dense_timed(1.0, 0.1)  # what was found in the last step
    train(model, optimizer, 4 * hvd.rank())
    hvd.join()
    found["met"] = [session(optimizer).choice.given_up, session(optimizer).exchange.compresses]
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    if hvd.rank() == 0:
        return {
            **found,
            "error": error_told(
                lambda: optimizer.apply(gradients, model.trainable_variables), Path(os.environ["DGC_TEST_FOLDER"])
            ),
        }
    stay_away(Path(os.environ["DGC_TEST_FOLDER"]))
    return found
