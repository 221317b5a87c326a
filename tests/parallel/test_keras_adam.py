"""Keras' Adam and AdamW over a second moment that all ranks share."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod import WarmupSchedule
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.keras.elastic import KerasState
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import (
    BATCHES,
    alone,
    distance,
    fingerprint,
    fit,
    gradients_of,
    keras,
    shard,
    smooth_model,
)
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
EPOCHS = 2  # dense ones, where there are some


def _adamw() -> Any:
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01, beta_1=0.9, beta_2=0.95)


def _optimizer(dense: bool = False, inner: Any = None) -> Any:
    warmup = WarmupSchedule(steps=EPOCHS * BATCHES, first_density=1.0, factor=1e-3) if dense else None
    compression = Compression.dgc(density=0.05, warmup=warmup, values="fp32", dense_values="fp32")
    return DistributedOptimizer(inner or _adamw(), compression=compression)


def _second(optimizer: Any) -> np.ndarray:
    return session(optimizer).buckets.second.packed()


def _print(optimizer: Any) -> str:
    return hashlib.sha256(_second(optimizer).tobytes()).hexdigest()


def _epochs(model: Any, epochs: int) -> list[float]:
    """The losses of more epochs."""
    x, y = shard(hvd.rank())
    return list(model.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history["loss"])


def _compressed(slots: list[Any]) -> np.ndarray:
    """Slots of the variables that are compressed, as one vector."""
    return np.concatenate([np.asarray(x).ravel() for x in slots if np.ndim(x) == 2 and np.shape(x)[-1] > 1])


def _trained(epochs: int = 5) -> tuple[Any, Any]:
    """Compressed from the first step on, which learns."""
    model = fit(smooth_model(), _optimizer(), epochs)
    losses = model.history.history["loss"]
    assert epochs < 5 or losses[4] < 0.5 * losses[1]
    return model, model.optimizer


def test_a_keras_file_goes_on_under_stock_adam(tmp_path):
    model, _ = _trained()
    path = tmp_path / f"{hvd.rank()}.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.AdamW and int(plain.optimizer.iterations) == 40
    assert not _compressed(plain.optimizer._momentums).any()
    first, *_, last = _epochs(plain, 3)
    assert last < first


def test_of_a_step_that_is_not_finite_nothing_is_learnt():
    model, optimizer = _trained(2)
    x, y = (tf.constant(a) for a in shard(hvd.rank()))
    before, second, bad = fingerprint(model), _second(optimizer), float("nan") if hvd.rank() == 1 else 1.0
    gradients = [bad * gradient for gradient in gradients_of(model, x, y)]
    optimizer.apply(gradients, model.trainable_variables)
    assert fingerprint(model) == before and np.array_equal(_second(optimizer), second)


def test_a_flush_leaves_stocks_slots_which_are_taken_over_again(tmp_path):
    model, optimizer = _trained()
    path = tmp_path / f"{hvd.rank()}.keras"
    model.save(path)
    inside = _compressed(keras.models.load_model(path).optimizer._velocities)
    before = fingerprint(model)
    optimizer.flush()
    tensors = optimizer.residual_state_dict()["tensors"].values()
    assert not any(x.any() for arrays in tensors for x in arrays.values())
    assert not _second(optimizer).any() and fingerprint(model) != before
    assert not _compressed(optimizer._momentums).any()
    np.testing.assert_allclose(_compressed(optimizer._velocities), inside, rtol=0.02)  # biased by steps
    first, *_, last = _epochs(model, 3)
    assert last < first and not _compressed(optimizer._velocities).any()
    same_on_ranks(fingerprint(model), _print(optimizer))


def test_dense_steps_are_stocks_and_what_they_have_learnt_is_taken_over():
    """Dense steps beside one process that sees everything; then compressed ones."""
    one, model = alone(_adamw(), EPOCHS), fit(smooth_model(), _optimizer(dense=True), EPOCHS)
    optimizer = model.optimizer
    assert distance(one, model) <= 1e-5 and not _second(optimizer).any()
    velocity = _compressed(optimizer._velocities)
    losses = _epochs(model, 1)
    assert _second(optimizer).any() and not _compressed(optimizer._velocities).any()
    buckets = session(optimizer).buckets
    squares = np.concatenate([buckets.second[name].square() for name in buckets.compressed])
    assert 0.5 < float(squares.sum() / velocity.sum()) < 3, "of the velocity, which is biased"
    losses += _epochs(model, 2)
    assert losses[-1] < losses[0]
    same_on_ranks(fingerprint(model))


def test_a_stock_optimizer_goes_on_compressed():
    one = alone(_adamw(), EPOCHS)
    stock = _optimizer(inner=one.optimizer)
    one.compile(stock, "mse")
    first, last = _epochs(one, 2)
    assert last < first and not _compressed(stock._velocities).any()
    same_on_ranks(fingerprint(one))


def test_elastic_state_hands_it_on_where_one_rank_knows_nothing():
    model, optimizer = _trained(2)
    state = KerasState(model, optimizer)
    for act in (state.restore, state.save, state.restore, state.sync):
        act()
    if hvd.rank() == 1:  # as a newcomer
        session(optimizer).buckets.clear()
    for act in (state.sync, state.reset, state.sync):
        act()
    same_on_ranks(_print(optimizer))
    first, last = _epochs(model, 2)
    assert last < first
    same_on_ranks(fingerprint(model))


def test_a_rank_whose_file_is_lost_knows_what_the_others_do(tmp_path):
    model, _ = _trained(2)
    save_checkpoint(tmp_path, model)
    if hvd.rank() == 1:
        next(tmp_path.glob("*rank1.npz")).unlink()
    other, resumed = smooth_model(5), _optimizer()
    load_checkpoint(tmp_path, other, resumed, residuals="if sound")
    fit(other, resumed, 1)
    same_on_ranks(_print(resumed), fingerprint(other))


def test_steps_of_fewer_variables_are_of_their_size():
    model, optimizer = _trained(4)
    (before,) = _epochs(model, 1)
    x, y = (tf.constant(a) for a in shard(hvd.rank()))
    variables, moved = list(model.trainable_variables)[2:], 0.0
    for i in range(10):
        at, was = 16 * (i % BATCHES), variables[0].numpy()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[at : at + 16]) - y[at : at + 16]) ** 2)
        optimizer.apply(tape.gradient(loss, variables), variables)
        moved = max(moved, float(np.abs(variables[0].numpy() - was).max()) / 1e-3)
    assert 0 < moved <= 10, "learning rates a step"
    assert float(loss) < 1.5 * before
    same_on_ranks(fingerprint(model))


def test_a_record_beside_a_keras_file_goes_on_bit_by_bit(tmp_path):
    whole, model = (fit(smooth_model(), _optimizer(dense=True), epochs) for epochs in (EPOCHS + 2, EPOCHS + 1))
    path = tmp_path / f"{hvd.rank()}.keras"
    model.save(path)
    record = model.optimizer.residual_state_dict()
    other = keras.models.load_model(path)
    optimizer = _optimizer(dense=True, inner=other.optimizer)
    optimizer.load_residual_state_dict(record)
    fit(other, optimizer, 1)
    assert fingerprint(other) == fingerprint(whole)
