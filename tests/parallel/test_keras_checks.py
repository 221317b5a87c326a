"""The ranks of a Keras job compare their weights, and find out the one that differs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import (
    BATCH,
    BATCHES,
    fingerprint,
    fit,
    gradients_of,
    momentum_sgd,
    shard,
    smooth_model,
)
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(3)]


def _optimizer(stock: Any = None, **fields: Any) -> Any:
    return DistributedOptimizer(stock or momentum_sgd(), compression=Compression.dgc(0.05, min_numel=16, **fields))


class _Spoil(keras.callbacks.Callback):
    """Changes one weight of rank 1 behind the others' backs, once, and what it knows of Adam's second moment."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 5 and hvd.rank() == 1:
            self.model.weights[2].assign_add(1e-6 * tf.ones(self.model.weights[2].shape))
            _second(self.model).rescale(2.0)


def _second(model: Any) -> Any:
    return session(model.optimizer).buckets.second


def test_a_drifting_replica_stops_all_ranks_with_its_name():
    """In a loop, where the error is ours, and in fit, where it is TensorFlow's with our text."""
    keras.utils.clear_session()  # layers are counted from here
    model, optimizer = smooth_model(), _optimizer(check_every=4)
    x, y = shard(hvd.rank())
    with pytest.raises(ReplicaMismatch, match=r"^after step 4 rank 2 has other weights than the others: '") as caught:
        for step in range(BATCHES):
            part = slice(step * BATCH, (step + 1) * BATCH)
            optimizer.apply(gradients_of(model, x[part], y[part]), model.trainable_variables)
            if step == 2 and hvd.rank() == 2:
                model.weights[4].assign_add(1e-6 * tf.ones(model.weights[4].shape))
    assert "dense_2/kernel" in str(caught.value) and step == 4
    in_fit = error_of(lambda: fit(smooth_model(), _optimizer(check_every=4), 2, callbacks=[_Spoil()]))
    assert "after step 8 rank 1 has other weights than the others" in in_fit


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_or_all_go_on_with_the_first_rank(kind):
    stock = momentum_sgd() if kind == "SGD" else keras.optimizers.Adam(1e-3)
    optimizer = _optimizer(stock, check_every=3, on_mismatch="broadcast")
    model = fit(smooth_model(), optimizer, 2, callbacks=[_Spoil()])
    second = _second(model).packed().tolist()[:64]
    assert kind == "SGD" or any(second)
    same_on_ranks(fingerprint(model), second)


def test_sound_replicas_are_not_disturbed():
    always, never = (fingerprint(fit(smooth_model(), _optimizer(check_every=every), 2)) for every in (1, 0))
    assert always == never
    same_on_ranks(always)


def test_many_skipped_steps_are_told_again_and_end_in_an_error_on_every_rank():
    """One rank's data are broken from the second epoch on."""
    model, optimizer = smooth_model(), _optimizer(max_skipped=11)
    fit(model, optimizer, 1)
    x, y = shard(hvd.rank())
    x = x * np.nan if hvd.rank() == 1 else x
    with messages() as texts:
        error = error_of(lambda: model.fit(x, y, batch_size=BATCH, epochs=9, shuffle=False, verbose=0))
    stats = optimizer.compression_stats()
    assert (stats["steps"], stats["skipped"]) == (8 + 11, 11)
    assert "step 18: a gradient was not finite on rank 1" in error and "11 in a row" in error
    said = [text for text in texts if "not finite" in text]
    assert len(said) == 2 * (hvd.rank() == 0)
    assert not said or said[1].endswith("skipped 10 of the last 10 steps")


def test_another_learning_rate_on_one_rank_is_named():
    """The message said that weights were to be broadcast."""

    def lower(batch: int, logs: Any) -> None:
        if batch == 4 and hvd.rank() == 2:
            model.optimizer.learning_rate = 0.0125

    model = smooth_model()
    lowering = keras.callbacks.LambdaCallback(on_train_batch_end=lower)
    error = error_of(lambda: fit(model, _optimizer(check_every=3), 2, callbacks=[lowering]))
    assert "after step 6 rank 2 has other weights" in error and "Broadcast" not in error
    assert "The learning rate is 0.05 on rank 0 and 0.0125 on rank 2" in error
