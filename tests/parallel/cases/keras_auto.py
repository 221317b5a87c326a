"""Compression.auto in Keras on real ranks: what `auto` shows for PyTorch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.state.residual_state import EARLIER_FP16
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, callbacks, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import make_exchange, session
from tests.helpers.keras_training import BATCH, BATCHES, fingerprint, fit, momentum_sgd, shard, smooth_model, weights
from tests.parallel.cases.keras_state import _remove, _shared_folder

STEPS = 24
UNROUNDED = {"factor_masking": False, "values": "fp32", "dense_values": "fp32"}


def _nesterov() -> Any:
    return momentum_sgd(nesterov=True, weight_decay=1e-3)


def adamw() -> Any:
    return keras.optimizers.AdamW(0.003, weight_decay=0.01, beta_1=0.9, beta_2=0.9)


OPTIMIZERS = {"SGD": _nesterov, "AdamW": adamw, "RMSprop": lambda: keras.optimizers.RMSprop(0.003)}


def made(make: Callable[[], Any] = _nesterov, mode: str | None = DENSE, **fields: Any) -> tuple[Any, Any]:
    """A model and its optimizer, whose exchange stays what it is until it is told; mode None: it chooses."""
    hvd.init()
    model = smooth_model()
    compression = Compression.auto(**{"density": 0.05, "min_numel": 16, **fields})
    optimizer = DistributedOptimizer(make(), compression=compression)
    optimizer.build(model.trainable_variables)
    known = model.trainable_variables
    make_exchange(optimizer, known)
    if mode is not None:
        take(optimizer, mode)
    return model, optimizer


def take(optimizer: Any, mode: str) -> None:
    """Go on with `mode`, whatever the clock says."""
    session(optimizer).choice.trial.stay(mode)


_steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # traced once for each model


def _step_of(model: Any, optimizer: Any) -> Any:
    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(model(x), y.dtype) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def train(
    model: Any, optimizer: Any, steps: int, before: Callable[[int], None] = lambda step: None, first: int = 0
) -> list[str]:
    """So many steps in a tf.function; `before` is called before each. Fingerprints after each."""
    x, y = (tf.constant(a) for a in shard(hvd.rank()))
    step = _steps.setdefault(model, _step_of(model, optimizer))
    seen = []
    for i in range(first, first + steps):
        before(i)
        at = BATCH * (i % BATCHES)
        step(x[at : at + BATCH], y[at : at + BATCH])
        seen.append(fingerprint(model))
    return seen


def stock(make: Callable[[], Any]) -> Any:
    """What `STEPS` steps without a choice make."""
    hvd.init()
    model, optimizer = smooth_model(), DistributedOptimizer(make(), compression=Compression.none)
    optimizer.build(model.trainable_variables)
    train(model, optimizer, STEPS)
    return model


def dense_steps() -> dict[str, bool]:
    """Before a choice every bit is that of the uncompressed exchange, clipped as Keras clips."""
    found = {}
    makers = {
        **OPTIMIZERS,
        "clipnorm": lambda: momentum_sgd(clipnorm=0.05),
        "clipvalue": lambda: momentum_sgd(clipvalue=0.001),
    }
    for name, make in makers.items():
        model, optimizer = made(make)
        found[name] = train(model, optimizer, STEPS)[-1] == fingerprint(stock(make))
    limited = weights(stock(lambda: momentum_sgd(global_clipnorm=0.1)))
    for name, one in (
        ("clip_norm", made(momentum_sgd, clip_norm=0.1)),
        ("global_clipnorm", made(lambda: momentum_sgd(global_clipnorm=0.1))),
    ):
        train(*one, STEPS)
        found[name] = bool(np.allclose(weights(one[0]), limited, rtol=1e-5, atol=1e-7))  # a sum in another order
    for eagerly in (False, True):
        ends = []
        for compression in (Compression.none, Compression.auto(min_numel=16)):
            optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
            ends.append(fingerprint(fit(smooth_model(), optimizer, run_eagerly=eagerly)))
        found[f"fit, eagerly: {eagerly}"] = ends[0] == ends[1]
    return found


_ORDER = (DENSE, COMPRESSED, DENSE, COMPRESSED, COMPRESSED, DENSE)


def _train_with(model: Any, optimizer: Any, modes: Sequence[str]) -> list[str]:
    """`STEPS` steps, a mode after the other; fingerprints after each."""
    return train(model, optimizer, STEPS, lambda step: take(optimizer, modes[step * len(modes) // STEPS]))


def switching() -> dict[str, Any]:
    """At density 1, unrounded, every switch leaves stock's training as it is; at 5% replicas stay replicas."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        if name == "SGD":
            model, optimizer = made(make, density=1.0, **UNROUNDED)
            _train_with(model, optimizer, _ORDER)
            ours, theirs = weights(model), weights(stock(make))
            found["distance"] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        model, optimizer = made(make)
        found[name] = _train_with(model, optimizer, _ORDER)
        arrays = optimizer.residual_state_dict()["tensors"].values()
        found[f"{name}, left"] = sum(float(abs(x).sum()) for each in arrays for x in each.values())
        found[f"{name}, finite"] = bool(np.isfinite(weights(model)).all())
    return found


def conservation() -> dict[str, float]:
    """Gradients that do not depend on the weights: whatever the order of exchanges, all of them arrive in the end."""
    hvd.init()
    found = {}
    for momentum in (0.0, 0.9):
        ends = []
        for modes in ([DENSE], [COMPRESSED, DENSE, COMPRESSED, DENSE]):
            model, optimizer = made(
                lambda momentum=momentum: keras.optimizers.SGD(0.01, momentum=momentum), **UNROUNDED
            )
            generator = np.random.default_rng(hvd.rank())
            before, variables = weights(model), model.trainable_variables
            for step in range(STEPS):
                take(optimizer, modes[step * len(modes) // STEPS])
                gradients = [tf.constant(generator.standard_normal(v.shape), tf.float32) for v in variables]
                optimizer.apply(gradients, variables)
            ends.append(weights(model) - before)
        found[str(momentum)] = float(np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(ends[0]))
    return found


def of_other_kinds() -> dict[str, Any]:
    """Sums instead of averages; half precision weights; RMSprop whose hand-back a limit would cut; other rates."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, make in {"SGD": lambda: momentum_sgd(learning_rate=0.002), "AdamW": adamw}.items():
        model = smooth_model()
        optimizer = DistributedOptimizer(make(), compression=Compression.auto(density=0.5, min_numel=16), op=hvd.Sum)
        optimizer.build(model.trainable_variables)
        make_exchange(optimizer, model.trainable_variables)
        modes = [DENSE, COMPRESSED, DENSE]
        take(optimizer, DENSE)
        momentum = []

        def switch(step: int, optimizer: Any = optimizer, modes: Any = modes, momentum: Any = momentum) -> None:
            take(optimizer, modes[step * len(modes) // STEPS])
            slot = optimizer.variables[2]  # momentum of the first variable
            momentum.append(float(np.linalg.norm(slot.numpy())))

        prints = train(model, optimizer, STEPS, switch)
        # before compression, and after it was handed back
        found[f"sum, {name}"] = [prints[-1], momentum[-1] / max(momentum[: STEPS // 3])]
    for dtype in ("bfloat16", "float64"):
        keras.config.set_dtype_policy(dtype)
        model, optimizer = made(momentum_sgd)
        keras.config.set_dtype_policy("float32")
        _train_with(model, optimizer, _ORDER)
        found[dtype] = [fingerprint(model), bool(np.isfinite(weights(model).astype(np.float32)).all())]
    model, optimizer = made(lambda: keras.optimizers.SGD(0.01, momentum=0.0, clipvalue=1e-6), **UNROUNDED)
    found["limit"] = _train_with(model, optimizer, [COMPRESSED, DENSE])[-1]
    model, optimizer = made()
    model.compile(optimizer, "mse")
    teller = callbacks.LearningRateScheduleCallback(0.05, lambda epoch: 0.5 if epoch else 1.0, staircase=True)
    reference = smooth_model()
    reference.compile(DistributedOptimizer(_nesterov(), compression=Compression.none), "mse")
    for each in (model, reference):
        each.fit(*shard(hvd.rank()), batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[teller])
    found["rates"] = fingerprint(model) == fingerprint(reference)
    return found


def resuming() -> dict[str, Any]:
    """Saved and loaded in each state: the rest of the run is the uninterrupted one, bit for bit."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, modes in (("SGD", (DENSE, EARLIER_FP16, COMPRESSED)), ("AdamW", (DENSE, COMPRESSED))):
        for mode in modes:
            ends = []
            for stops in (False, True):
                model, optimizer = made(OPTIMIZERS[name])
                train(model, optimizer, STEPS // 3)
                take(optimizer, DENSE if mode == EARLIER_FP16 else mode)
                train(model, optimizer, STEPS // 3, first=STEPS // 3)
                if stops:
                    take(optimizer, mode)  # as earlier versions wrote it where fp16 was chosen
                    folder = _shared_folder(f"auto-{name}-{mode}")
                    save_checkpoint(folder, model, optimizer)
                    model, optimizer = made(OPTIMIZERS[name], mode=None)
                    load_checkpoint(folder, model, optimizer)
                    _remove(folder)
                train(model, optimizer, STEPS // 3, first=2 * STEPS // 3)
                ends.append(fingerprint(model))
            found[f"{name}, {mode}"] = [ends[0] == ends[1], session(optimizer).choice.trial.mode, ends[1]]
    return found


def on_nodes() -> dict[str, Any]:
    """Workers of a node keep slices: switches are the same for all of them, and lose nothing."""
    from dgc_horovod.tensorflow import node_process_sets

    hvd.init(process_sets=node_process_sets(2))
    found: dict[str, Any] = {}
    for name in ("SGD", "AdamW"):
        model, optimizer = made(OPTIMIZERS[name], exchange="hierarchical", node_size=2)
        found[name] = _train_with(model, optimizer, _ORDER)
        record = optimizer.residual_state_dict()["tensors"].values()
        found[f"{name}, left"] = sum(float(abs(x).sum()) for arrays in record for x in arrays.values())
        found[f"{name}, finite"] = bool(np.isfinite(weights(model)).all())
    found["nodes"] = session(optimizer).exchange.steps.node_size
    return found
