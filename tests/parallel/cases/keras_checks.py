"""Keras replicas that drift apart are found out, on real ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCH, BATCHES, fingerprint, fit, momentum_sgd, shard, smooth_model
from tests.helpers.logs import messages


def _optimizer(make: Any = momentum_sgd, **fields: Any) -> Any:
    return DistributedOptimizer(make(), compression=Compression.dgc(0.05, min_numel=16, **fields))


class _Spoil(keras.callbacks.Callback):
    """Changes one weight of rank 1, once, and what it knows of Adam's second moment."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 5 and hvd.rank() == 1:
            self.model.weights[2].assign_add(1e-6 * tf.ones(self.model.weights[2].shape))
            _second(self.model).rescale(2.0)


def _second(model: Any) -> Any:
    return session(model.optimizer).buckets.second


def drifting() -> dict[str, Any]:
    """One rank's weights are changed behind the others' backs, in fit and in a loop."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, make in {"SGD": momentum_sgd, "Adam": lambda: keras.optimizers.Adam(1e-3)}.items():
        model = fit(smooth_model(), _optimizer(make, check_every=3, on_mismatch="broadcast"), 2, callbacks=[_Spoil()])
        found[name] = [fingerprint(model), _second(model).packed().tolist()[:64]]
    try:
        fit(smooth_model(), _optimizer(check_every=4), 2, callbacks=[_Spoil()])
        found["fit"] = ""
    except Exception as error:  # TensorFlow's own, with our text
        found["fit"] = str(error)
    found["sound"] = [fingerprint(fit(smooth_model(), _optimizer(check_every=every), 2)) for every in (0, 1)]
    return found


def why_different() -> str:
    """One rank alone lowers its learning rate."""
    hvd.init()

    def lower(batch: int, logs: Any) -> None:
        if batch == 4 and hvd.rank() == 2:
            model.optimizer.learning_rate = 0.0125

    model = smooth_model()
    lowering = keras.callbacks.LambdaCallback(on_train_batch_end=lower)
    return error_of(lambda: fit(model, _optimizer(check_every=3), 2, callbacks=[lowering]))


def in_a_loop() -> dict[str, Any]:
    """The same in eager mode, where the error is ours."""
    hvd.init()
    model, optimizer = smooth_model(), _optimizer(check_every=4)
    x, y = shard(hvd.rank())
    for step in range(BATCHES):
        part = slice(step * BATCH, (step + 1) * BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[part]) - y[part]) ** 2)
        try:
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        except ReplicaMismatch as error:
            return {"error": str(error), "step": step}
        if step == 2 and hvd.rank() == 2:
            model.weights[4].assign_add(1e-6 * tf.ones(model.weights[4].shape))
    return {"error": "", "step": BATCHES}


def for_long() -> dict[str, Any]:
    """One rank's data are broken from the second epoch on."""
    hvd.init()
    model, optimizer = smooth_model(), _optimizer(max_skipped=11)
    fit(model, optimizer, 1)
    x, y = shard(hvd.rank())
    x = x * np.nan if hvd.rank() == 1 else x
    with messages() as texts:
        error = error_of(lambda: model.fit(x, y, batch_size=BATCH, epochs=9, shuffle=False, verbose=0))
    stats = optimizer.compression_stats()
    said = [text for text in texts if "not finite" in text]
    return {"error": error, "steps": stats["steps"], "skipped": stats["skipped"], "said": said}
