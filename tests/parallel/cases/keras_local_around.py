"""What scripts do around Keras' local steps, on real ranks: load, broadcast, freeze, accumulate, overflow, resume."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import broadcast_variables
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, callbacks, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCH, BATCHES, fingerprint, fit, shard, smooth_model, weights
from tests.parallel.cases.keras_state import _remove, _shared_folder

H = 4


def _wrapped(optimizer: Any = None, **fields: Any) -> Any:
    settings = {"steps": H, "density": 0.1, **fields}
    return DistributedOptimizer(optimizer or keras.optimizers.AdamW(2e-3), compression=Compression.local(**settings))


def _train(model: Any, steps: int) -> None:
    """So many batches of this rank, from its first on."""
    x, y = shard(hvd.rank())
    for step in range(steps):
        at = BATCH * (step % BATCHES)
        model.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])


def _apart(values: Any) -> float:
    """How far the ranks are apart in a vector, at most."""
    every = hvd.allgather(tf.constant(np.float32(values).reshape(1, -1)), name=f"apart.{np.size(values)}").numpy()
    return float(np.abs(every - every[:1]).max())


def _variable(constraint: Any = None) -> Any:
    variable = keras.Variable(tf.ones((40, 50)))
    variable.constraint = constraint
    return variable


def _apply(optimizer: Any, variable: Any, times: int) -> None:
    for i in range(times):
        gradient = np.random.default_rng(10 * i + hvd.rank()).standard_normal((40, 50))
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])


def accumulating() -> dict[str, Any]:
    """Two passes for a step: after which calls the ranks have exchanged, and what is counted; then a flush."""
    hvd.init()
    variable = _variable()
    optimizer = _wrapped(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    exchanged = []
    for _ in range(4 * H):
        _apply(optimizer, variable, 1)
        exchanged.append(optimizer.compression_stats()["steps"])
    dense = optimizer.compression_stats()["bytes_dense"] / variable.numpy().nbytes
    return {"exchanged": exchanged, "dense": dense, "flush": error_of(optimizer.flush), "apart": _apart(variable)}


def beginning() -> dict[str, Any]:
    """Models that differ at first, and are broadcast after their first step: Horovod's way with loops of one's own."""
    hvd.init()
    model, optimizer = smooth_model(hvd.rank()), _wrapped()
    model.compile(optimizer, "mse")
    _train(model, 1)
    for variables in (model.variables, optimizer.variables):
        broadcast_variables(variables, 0)
    _train(model, 2 * H - 1)
    keras.utils.set_random_seed(hvd.rank())
    late = keras.Sequential([keras.layers.Dense(96, activation="tanh"), keras.layers.Dense(1)])
    fit(late, _wrapped(), 1, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
    return {"loop": _apart(weights(model)), "fit": _apart(weights(late))}


def loading() -> dict[str, Any]:
    """Weights loaded in the middle of a round: by every rank, by one and broadcast, set by the script."""
    hvd.init()
    model, optimizer = smooth_model(), _wrapped(outer_momentum=0.9, outer_rate=0.7)
    fit(model, optimizer, 2)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        file, saved = f"{folder}/of.weights.h5", weights(model)
        model.save_weights(file)
        _train(model, H + 2)
        model.load_weights(file)
        optimizer.exchange()
        found["kept"] = float(np.abs(weights(model) - saved).max())
        _train(model, H + 2)
        if hvd.rank() == 0:
            model.load_weights(file)
    x, y = shard(hvd.rank())
    broadcast = callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x[: 4 * BATCH], y[: 4 * BATCH], batch_size=BATCH, verbose=0, shuffle=False, callbacks=[broadcast])
    optimizer.exchange()
    found["one rank"] = _apart(weights(model))
    _train(model, 2)
    model.set_weights(smooth_model(7).get_weights())
    optimizer.clear_residuals()
    optimizer.exchange()
    found["set"] = float(np.abs(weights(model) - weights(smooth_model(7))).max())
    return found


def freezing() -> dict[str, Any]:
    """A layer that is frozen in the middle of a round stays; two sets of variables take turns."""
    hvd.init()
    model, optimizer = smooth_model(), _wrapped()
    fit(model, optimizer, 1)
    before = model.layers[0].kernel.numpy()
    _train(model, 2)
    model.layers[0].trainable = False
    model.compile(optimizer, "mse")
    _train(model, 2 * H - 2)
    moved, apart = float(np.abs(model.layers[0].kernel.numpy() - before).max()), _apart(weights(model))
    one, other, turns = _variable(), _variable(), _wrapped(keras.optimizers.SGD(0.1))
    turns.build([one, other])
    for i in range(2 * H):
        _apply(turns, (one, other)[i % 2], 1)
    changed = [float(np.abs(variable.numpy() - 1).max()) for variable in (one, other)]
    return {"moved": moved, "apart": apart, "turns": _apart(np.stack([one, other])), "changed": min(changed)}


def overflowing() -> dict[str, Any]:
    """One rank's gradient is beyond float32 when Adam squares it, and another not finite: the next steps are small."""
    hvd.init()
    variable, optimizer = _variable(), _wrapped(keras.optimizers.Adam(1e-2))
    _apply(optimizer, variable, H)
    for i in range(H):
        gradient = np.ones((40, 50), np.float32)
        if hvd.rank() == 1:
            gradient[0, 0] = 1e25
        optimizer.apply([tf.constant(gradient)], [variable])
        if hvd.rank() == 1 and i == 1:
            variable.assign(variable + np.nan * (np.arange(50) == 1))
    _apply(optimizer, variable, H)
    return {"apart": _apart(variable), "largest": float(np.abs(variable.numpy()).max())}


def spoiled_gradient() -> dict[str, Any]:
    """One gradient of one rank is not finite: a step with zeros on that rank, and the round is exchanged."""
    hvd.init()
    variable, optimizer = _variable(), _wrapped()
    for step in range(2 * H):
        gradient = np.ones((40, 50), np.float32)
        if hvd.rank() == 1 and step == H + 1:
            gradient[0, 0] = np.nan
        optimizer.apply([tf.constant(gradient)], [variable])
        sound = bool(np.isfinite(variable.numpy()).all())
    counts = session(optimizer).exchange.steps.counts
    return {"sound": sound, "apart": _apart(variable), "skipped": counts.skipped, "left out": counts.left_out}


def exported() -> dict[str, str]:
    """A layer was frozen since the checkpoint was begun; it is loaded to be flushed and saved."""
    hvd.init()
    folder = _shared_folder("keras-exported")
    model = smooth_model()
    model.compile(_wrapped(), "mse")
    _train(model, H)
    model.layers[0].trainable = False
    model.compile(model.optimizer, "mse")
    _train(model, H)
    save_checkpoint(folder, model)
    other = smooth_model(1)
    other.layers[0].trainable = False
    other.compile(_wrapped(), "mse")
    other.optimizer.build(other.weights)
    load_checkpoint(folder, other)
    found = {"flushed": error_of(other.optimizer.flush)}
    _remove(folder)
    return found


def options() -> dict[str, Any]:
    """What belongs to the inner optimizer: constraints, a limit set later, momentum that follows the learning rate."""
    hvd.init()
    variable = _variable(keras.constraints.UnitNorm())
    optimizer = _wrapped(keras.optimizers.SGD(0.1, momentum=0.9), outer_momentum=0.9)
    _apply(optimizer, variable, 2 * H)
    found: dict[str, Any] = {"norm": float(np.abs(np.linalg.norm(variable.numpy(), axis=0) - 1).max())}
    optimizer.global_clipnorm = 1e-3
    found["clipped"] = float(tf.norm(optimizer._clip_gradients([tf.ones((40, 50))])[0]))
    velocity, model = np.abs(optimizer.momentums[0].numpy()).sum(), smooth_model()
    model.compile(optimizer, "mse")
    rates = callbacks.LearningRateScheduleCallback(0.1, 0.5)
    rates.set_model(model)
    rates.on_epoch_begin(1)
    rates.on_train_batch_begin(0)
    found["velocity"] = float(np.abs(optimizer.momentums[0].numpy()).sum() / velocity)
    _apply(optimizer, variable, 2)
    apart = _apart(variable)
    tf.function(optimizer.exchange)()
    return {**found, "within": apart, "in a graph": _apart(variable)}


def repairing() -> dict[str, Any]:
    """Weights that one rank has set are found at the next exchange, and set right with the inner state."""
    hvd.init()
    found = {}
    for action in ("broadcast", "stop"):
        variable, optimizer = _variable(), _wrapped(on_mismatch=action, check_every=1)
        _apply(optimizer, variable, H)
        variable.assign_add(tf.fill((40, 50), 0.1 * hvd.rank()))
        found[action] = error_of(lambda o=optimizer, v=variable: _apply(o, v, H))
        if action == "broadcast":
            found["apart"] = _apart(np.stack([variable, *optimizer._momentums]))
    return found


def own() -> dict[str, Any]:
    """Variables that are left to each rank, all of them: nothing is exchanged."""
    hvd.init()
    variable, optimizer = _variable(), _wrapped()
    optimizer.register_local_var(variable)
    _apply(optimizer, variable, H)
    return {"apart": _apart(variable), "exchange": error_of(optimizer.exchange)}


def refused() -> dict[str, str]:
    """What cannot be is refused in words."""
    hvd.init()
    variable, optimizer = _variable(), _wrapped()
    _apply(optimizer, variable, 1)
    found = {
        "average": error_of(lambda: _wrapped(keras.optimizers.Adam(use_ema=True))),
        "in a round": error_of(optimizer.residual_state_dict),
        "late": error_of(lambda: optimizer.register_local_var(variable)),
    }
    optimizer.exchange()
    found["after it"] = error_of(optimizer.residual_state_dict)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        found["float16"] = error_of(lambda: smooth_model().compile(_wrapped(), "mse"))
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return found


def resumed() -> dict[str, Any]:
    """Saved in the middle of a round, which ends it, and resumed; by others in the middle of theirs."""
    hvd.init()
    found: dict[str, Any] = {}
    kinds = {"AdamW": keras.optimizers.AdamW, "SGD": lambda rate: keras.optimizers.SGD(10 * rate, momentum=0.9)}
    for name, make in kinds.items():
        folder = os.path.join(os.environ["DGC_TEST_FOLDER"], name)
        models = [smooth_model(seed) for seed in range(3)]
        for model in models:
            model.compile(_wrapped(make(2e-3), outer_rate=0.7), "mse")
        _train(models[0], 2 * H + 2)
        _train(models[2], 1)
        save_checkpoint(folder, models[0])
        saved = fingerprint(models[0])
        for model in models[1:]:
            load_checkpoint(folder, model)
        loaded = {saved, *map(fingerprint, models)}
        for model in models:
            _train(model, 2 * H + 2)
        found[name] = [len(loaded), len(set(map(fingerprint, models))), fingerprint(models[0])]
    return found


def missing() -> dict[str, Any]:
    """Rank 1 has fewer steps: rank 0 is told at the end of the round, and rank 1 at its own."""
    hvd.init()
    variable, optimizer = _variable(), _wrapped()
    _apply(optimizer, variable, 2 * H - 1)
    start = time.monotonic()
    if hvd.rank() == 1:
        time.sleep(12)
    return {"said": error_of(lambda: _apply(optimizer, variable, 1)), "seconds": time.monotonic() - start}
