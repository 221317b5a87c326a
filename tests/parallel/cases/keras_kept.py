"""What ranks have kept, when the variables, the state or the way to step are others: layers frozen, flush, files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod import WarmupSchedule
from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fit, momentum_sgd, smooth_model, weights
from tests.parallel.cases.keras_state import _remove, _shared_folder

SIZE = (64, 64)


def _variables(count: int) -> list[Any]:
    return [keras.Variable(np.zeros(SIZE, np.float32)) for _ in range(count)]


def _gradients(draws: np.random.Generator, count: int, mean: float = 1.0) -> list[tf.Tensor]:
    return [tf.constant((mean + 0.1 * draws.standard_normal(SIZE)).astype(np.float32)) for _ in range(count)]


def _mean_step(optimizer: Any, variables: Sequence[Any], steps: int, mean: float = 1.0) -> float:
    """How far an element of the first variable goes in a step, in the mean."""
    draws, moved = np.random.default_rng(hvd.rank()), 0.0
    for _ in range(steps):
        before = variables[0].numpy().copy()
        optimizer.apply(_gradients(draws, len(variables), mean), list(variables))
        moved += float(np.abs(variables[0].numpy() - before).mean())
    return moved / steps


def adam_begins_anew() -> dict[str, Any]:
    """Adam's steps after a layer is frozen, and after what ranks have kept is emptied, beside those before."""
    hvd.init()
    found = {}
    for name in ("frozen", "cleared"):
        variables = _variables(2)
        compression = Compression.dgc(density=0.5, min_numel=1, values="fp32")
        optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3), compression=compression)
        optimizer.build(variables)
        before = _mean_step(optimizer, variables, 60)
        if name == "frozen":
            variables[1].trainable = False
        else:
            optimizer.clear_residuals()
        trained = [variable for variable in variables if variable.trainable]
        found[name] = _mean_step(optimizer, trained, 10) / before
    return found


def warmup_goes_on() -> dict[str, Any]:
    """Elements selected in a step before and after a layer is frozen, late in the warm-up and after it."""
    hvd.init()
    variables = _variables(2)
    compression = Compression.dgc(density=0.001, min_numel=1, warmup=WarmupSchedule(steps=20))
    optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
    optimizer.build(variables)
    _mean_step(optimizer, variables, 25)
    before = optimizer.compression_stats()["selected"]
    variables[1].trainable = False
    _mean_step(optimizer, variables[:1], 5)
    return {"selected": (optimizer.compression_stats()["selected"] - before) / 5}


def flushed() -> dict[str, Any]:
    """A flush applies all that waited: no clipping, no loss scale; and constraints hold after it."""
    hvd.init()
    found = {}
    for name, options in {"clipped": {"global_clipnorm": 0.1}, "scaled": {"loss_scale_factor": 1024.0}}.items():
        (variable,) = _variables(1)
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(1.0, **options), compression=Compression.topk(density=0.001, min_numel=1)
        )
        for _ in range(5):
            optimizer.apply(_gradients(np.random.default_rng(0), 1), [variable])
        waits = np.linalg.norm(optimizer.residual_state_dict()["tensors"]["0"]["v"])
        before = variable.numpy().copy()
        optimizer.flush()
        found[name] = float(np.linalg.norm(variable.numpy() - before) / waits)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64, kernel_constraint="non_neg")])
    optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(density=0.01, min_numel=1))
    model.add(keras.layers.Dense(1))
    fit(model, optimizer, 2)
    optimizer.flush()
    found["constraint"] = float(model.layers[0].kernel.numpy().min())
    return found


def loaded() -> dict[str, Any]:
    """Between load_checkpoint and the first step: a flush applies what was loaded, clear_residuals empties it."""
    hvd.init()
    folder = _shared_folder("kept")

    def compressed() -> Any:
        return DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(density=0.01, min_numel=16))

    model, optimizer = smooth_model(), compressed()
    fit(model, optimizer, 1)
    save_checkpoint(folder, model, optimizer)
    optimizer.flush()
    other, resumed = smooth_model(1), compressed()
    load_checkpoint(folder, other, resumed)
    resumed.flush()
    cleared = smooth_model(2)
    emptied = compressed()
    load_checkpoint(folder, cleared, emptied)
    _remove(folder)
    emptied.clear_residuals()
    zeros = [tf.zeros(v.shape) for v in cleared.trainable_variables]
    emptied.apply(zeros, cleared.trainable_variables)
    kept = [x for arrays in emptied.residual_state_dict()["tensors"].values() for x in arrays.values()]
    slots: dict[str, Any] = {}
    resumed.save_own_variables(slots)
    return {
        "flushed": float(np.abs(weights(other) - weights(model)).max()),
        "velocity": float(sum(np.abs(x).sum() for x in slots.values() if np.ndim(x) == 2)),
        "cleared": float(sum(np.abs(x).sum() for x in kept)),
    }


def outer_momentum() -> dict[str, Any]:
    """Local steps: what load_checkpoint has brought is there behind the Broadcast callback of fit."""
    hvd.init()
    folder = _shared_folder("outer")
    model, optimizer = smooth_model(), DistributedOptimizer(momentum_sgd(), compression=Compression.local(steps=2))
    fit(model, optimizer, 1, [BroadcastGlobalVariablesCallback(0)])
    save_checkpoint(folder, model, optimizer)
    other, resumed = smooth_model(1), DistributedOptimizer(momentum_sgd(), compression=Compression.local(steps=2))
    load_checkpoint(folder, other, resumed)
    _remove(folder)
    for each, its in ((model, optimizer), (other, resumed)):
        fit(each, its, 1, [BroadcastGlobalVariablesCallback(0)] if each is other else [])
    return {"distance": float(np.abs(weights(other) - weights(model)).max())}


class _OwnApply(keras.optimizers.SGD):
    """A step that Keras' own ``apply`` has no part in."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(self.learning_rate * gradient)


def refused() -> dict[str, Any]:
    """What would train wrongly, in words."""
    hvd.init()
    (variable,) = _variables(1)
    gradients = _gradients(np.random.default_rng(0), 1)
    own = DistributedOptimizer(_OwnApply(0.1))
    own.build([variable])
    scaler = keras.optimizers.LossScaleOptimizer(momentum_sgd())

    def scaled_tape() -> None:
        with tf.GradientTape() as tape:
            loss = scaler.scale_loss(tf.reduce_sum(variable * gradients[0]))
        tape = DistributedGradientTape(tape, compression=Compression.topk(density=0.01, min_numel=1))
        scaler.apply(tape.gradient(loss, [variable]), [variable])

    return {
        "own apply": error_of(lambda: own.apply(gradients, [variable])),
        "scaled tape": error_of(scaled_tape),
    }


def begins() -> dict[str, Any]:
    """The first batch: models that one rank alone has built, one that overflows in eager mode, unused embeddings."""
    hvd.init()
    found: dict[str, Any] = {}
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    if hvd.rank() == 0:
        model.build((None, 32))
    fit(model, DistributedOptimizer(momentum_sgd(learning_rate=0.01)), 1, [BroadcastGlobalVariablesCallback(0)])
    found["built by one"] = float(weights(model).sum())

    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(1, dtype="float32")])
    scaler = keras.optimizers.LossScaleOptimizer(momentum_sgd(learning_rate=0.01), initial_scale=2.0**127)
    keras.mixed_precision.set_global_policy("float32")
    fit(model, DistributedOptimizer(scaler), 1, [BroadcastGlobalVariablesCallback(0)], run_eagerly=True)
    found["overflow"] = float(weights(model).sum())

    embedding, other = keras.layers.Embedding(50, 8), keras.Variable(np.ones(8, np.float32))
    embedding.build((None,))
    embedding.embeddings.assign(np.ones((50, 8)))
    variables = [embedding.embeddings, other]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other * 2)
        if hvd.rank() == 0:
            loss += tf.reduce_sum(embedding(tf.constant([1, 2])))
    DistributedOptimizer(keras.optimizers.SGD(0.1)).apply(tape.gradient(loss, variables), variables)
    found["embedding"] = float(np.sum(embedding.embeddings.numpy()))
    return found


def stock_with_a_limit() -> dict[str, Any]:
    """``auto`` that ends in no compression still clips the average, as it says."""
    hvd.init()
    found = {}
    for name, make in {"sparse": keras.optimizers.SGD, "amsgrad": _amsgrad}.items():
        (variable,) = _variables(1)
        optimizer = DistributedOptimizer(make(1.0), compression=Compression.auto(clip_norm=0.1))
        gradient = tf.fill(SIZE, 1.0 + hvd.rank())
        if name == "sparse":
            gradient = tf.IndexedSlices(gradient, tf.range(SIZE[0]), tf.constant(SIZE))
        optimizer.apply([gradient], [variable])
        slot = variable if name == "sparse" else optimizer._momentums[0]
        found[name] = float(np.linalg.norm(slot.numpy()) * (1 if name == "sparse" else 10))
    return found


def _amsgrad(rate: float) -> Any:
    return keras.optimizers.Adam(rate, amsgrad=True)


def summed() -> dict[str, Any]:
    """op=Sum: the velocity in a file is that of the sum of all ranks' gradients."""
    hvd.init()
    (variable,) = _variables(1)
    compression = Compression.dgc(density=0.01, min_numel=1, factor_masking=False)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression, op=hvd.Sum)
    for _ in range(5):
        optimizer.apply([tf.ones(SIZE)], [variable])
    slots: dict[str, Any] = {}
    optimizer.save_own_variables(slots)
    velocity = next(x for x in slots.values() if np.shape(x) == SIZE)
    return {"velocity": float(np.mean(velocity)), "stock": -0.1 * hvd.size() * sum(0.9**i for i in range(5))}
