"""Keras' local steps on real ranks: what is exchanged, what is kept, what goes wrong."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCHES, fingerprint, fit, shard, smooth_model, weights
from tests.parallel.cases.keras_state import _remove, _shared_folder

H = 4  # of the batches of an epoch
WHOLE: dict[str, Any] = {"density": 1.0, "local_decay": 1.0, "values": "fp32", "dense_values": "fp32"}


def _adamw() -> Any:
    return keras.optimizers.AdamW(2e-3, weight_decay=0.01)


def _wrapped(**fields: Any) -> Any:
    settings = {"steps": H, "density": 0.1, **fields}
    return DistributedOptimizer(_adamw(), compression=Compression.local(**settings))


def averaging() -> dict[str, float]:
    """At density 1: each rank trains alone, and every H steps the weights become their mean."""
    hvd.init()
    found = {}
    for name, momentum, rate in (("mean", 0.0, 1.0), ("Nesterov", 0.9, 0.7)):
        model = fit(smooth_model(), _wrapped(outer_momentum=momentum, outer_rate=rate, **WHOLE), 2)
        alone, inner = smooth_model(), _adamw()
        alone.compile(inner, "mse")
        x, y = shard(hvd.rank())
        anchor, outer = [w.copy() for w in alone.get_weights()], None
        for step in range(2 * BATCHES):
            at = 16 * (step % BATCHES)
            alone.train_on_batch(x[at : at + 16], y[at : at + 16])
            if (step + 1) % H == 0:
                pairs = enumerate(zip(anchor, alone.get_weights(), strict=True))
                change = [hvd.allreduce(tf.constant(a - w), name=f"{name}.{step}.{i}").numpy() for i, (a, w) in pairs]
                outer = change if outer is None else [momentum * o + c for o, c in zip(outer, change, strict=True)]
                ahead = [c + momentum * o for c, o in zip(change, outer, strict=True)] if momentum else change
                anchor = [a - rate * c for a, c in zip(anchor, ahead, strict=True)]
                alone.set_weights(anchor)
        found[name] = float(np.linalg.norm(weights(model) - weights(alone)) / np.linalg.norm(weights(alone)))
    return found


def learning() -> dict[str, Any]:
    """`fit` at 10%, 2 bits: replicas after rounds, learning, traffic; then a flush."""
    hvd.init()
    model, optimizer = smooth_model(), _wrapped(check_every=1)
    losses = list(fit(model, optimizer, 20).history.history["loss"])
    stats, after = optimizer.compression_stats(), fingerprint(model)
    x, y = shard(hvd.rank())
    model.fit(x[:32], y[:32], batch_size=16, epochs=1, shuffle=False, verbose=0)
    within = fingerprint(model)
    optimizer.exchange()
    early = fingerprint(model)
    optimizer.flush()
    return {
        "after": after, "within": within, "early": early, "flushed": fingerprint(model), "losses": losses,
        "exchanges": stats["steps"], "fewer": stats["bytes_dense_received"] / stats["bytes_received"],
    }  # fmt: skip


def faults() -> dict[str, Any]:
    """A rank whose weights are not finite: nobody moves, and training goes on."""
    hvd.init()
    model, optimizer = smooth_model(), _wrapped()
    fit(model, optimizer, 1)
    before = fingerprint(model)
    x, y = shard(hvd.rank())
    kernel, bad = model.trainable_variables[0], hvd.rank() == 1
    spoil = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: kernel.assign(np.nan * kernel) if bad and batch == 1 else None
    )
    model.fit(x[: 16 * H], y[: 16 * H], batch_size=16, epochs=1, shuffle=False, verbose=0, callbacks=[spoil])
    stayed = fingerprint(model) == before
    seconds = [np.asarray(second) for second in optimizer._velocities]
    sound = all(np.isfinite(second).all() and second.any() for second in seconds)  # empty ones: steps of several times
    history = model.fit(x, y, batch_size=16, epochs=5, shuffle=False, verbose=0)
    return {"stayed": stayed, "sound": sound, "replica": fingerprint(model), "last": history.history["loss"][-1]}


def _waiting(optimizer: Any) -> np.ndarray:
    return np.concatenate([arrays["v"] for _, arrays in sorted(optimizer.residual_state_dict()["tensors"].items())])


def resumed() -> dict[str, Any]:
    """Saved within a round, which ends with it, and gone on with."""
    hvd.init()
    model, optimizer = smooth_model(), _wrapped()
    fit(model, optimizer, 2)
    x, y = shard(hvd.rank())
    model.fit(x[:32], y[:32], batch_size=16, epochs=1, shuffle=False, verbose=0)
    folder = _shared_folder("keras-local")
    save_checkpoint(folder, model)
    saved = fingerprint(model)
    other, again = smooth_model(5), _wrapped()
    load_checkpoint(folder, other, again)
    loaded = fingerprint(other)
    kept = [_waiting(optimizer), _waiting(again)]
    model.fit(x[:32], y[:32], batch_size=16, epochs=1, shuffle=False, verbose=0)
    load_checkpoint(folder, model)  # within a round, which is over then
    optimizer.exchange()
    kept.append(_waiting(optimizer))
    _remove(folder)
    other.compile(again, "mse")
    losses = list(other.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"])
    again.exchange()
    same = all(np.array_equal(kept[0], each) for each in kept)
    return {
        "saved": saved, "loaded": loaded, "e": same and bool(np.any(kept[0])),
        "replica": fingerprint(other), "losses": losses,
    }  # fmt: skip


def misuse() -> dict[str, str]:
    """What cannot be is refused in words."""
    hvd.init()
    local = Compression.local(steps=2)
    scaled = keras.optimizers.LossScaleOptimizer(_adamw())
    return {
        "sum": error_of(lambda: DistributedOptimizer(_adamw(), compression=local, op=hvd.Sum)),
        "scaled": error_of(lambda: DistributedOptimizer(scaled, compression=local)),
        "tape": error_of(lambda: DistributedGradientTape(tf.GradientTape(), compression=local)),
    }
