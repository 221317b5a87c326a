"""Callbacks, broadcast, saved models, checkpoints and elastic state under Keras 3."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import broadcast_variables
from dgc_horovod.tensorflow.keras import (
    Compression,
    DistributedOptimizer,
    WarmupSchedule,
    callbacks,
    elastic,
    load_model,
)
from dgc_horovod.tensorflow.variables import own_variables
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fingerprint, fit, fitted, keras, momentum_sgd, shard, smooth_model, weights
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import everything

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.05)
BEGIN = [callbacks.BroadcastGlobalVariablesCallback(0)]


def _wrapped(compression: Any = Compression.none, **options: Any) -> Any:
    return DistributedOptimizer(momentum_sgd(**options), compression=compression)


def test_variables_of_all_dtypes_are_broadcast():
    """Those too that Horovod does not know."""
    dtypes = ["float32", "float16", "bfloat16", "int64", "uint32", "bool"]
    variables = [tf.Variable(tf.cast(tf.fill((3,), hvd.rank()), dtype)) for dtype in dtypes]
    broadcast_variables([*variables, keras.Variable(np.full((2,), hvd.rank(), "float32"))], root_rank=1)
    assert [float(tf.cast(v, tf.float32)[0]) for v in variables] == [1.0] * 6


def test_a_broadcast_that_is_forgotten_is_told_of():
    with messages() as said:
        fit(smooth_model(seed=hvd.rank()), _wrapped(), 1)
    assert len([text for text in said if "DIFFERENT WEIGHTS" in text]) == (hvd.rank() == 0)


@pytest.mark.parametrize("compression", [Compression.none, FEW], ids=["none", "dgc"])
def test_weights_and_rates_are_broadcast(compression):
    if hvd.rank() == 0:
        smooth_model()  # Keras counts on: all names after this one differ between the ranks
    optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3 * (hvd.rank() + 1)), compression=compression)
    model = fit(smooth_model(seed=hvd.rank()), optimizer, 1, BEGIN)
    assert float(optimizer.learning_rate.numpy()) == pytest.approx(1e-3)
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize("kind", ["frozen", "built by its first batch", "built by one rank alone"])
def test_models_of_every_kind_are_broadcast(kind):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(64, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.trainable = kind != "frozen"  # as in Horovod's test of this callback
    if kind == "frozen" or (hvd.rank() == 0 and "one rank" in kind):
        model.build((None, 32))
    with messages() as said:
        fit(model, _wrapped(FEW), 1, BEGIN)
    assert not [text for text in said if "DIFFERENT WEIGHTS" in text]
    same_on_ranks(fingerprint(model))


def test_local_variables_are_not_broadcast():
    local = smooth_model(seed=hvd.rank())
    before = local.weights[0].numpy()
    start = callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local.weights[0])
    fit(local, _wrapped(learning_rate=1e-9), 1, [start])
    np.testing.assert_allclose(local.weights[0].numpy(), before, atol=1e-4)


def test_a_broadcast_that_cannot_be():
    model = smooth_model()
    assert "takes variables" in error_of(lambda: broadcast_variables(model.get_weights(), 0))
    assert "root_rank must be in [0, 2), got 7" in error_of(lambda: broadcast_variables(model.weights, 7))
    shapes = error_of(lambda: broadcast_variables([tf.Variable(tf.ones(2 + hvd.rank()))], 0))
    assert "variables: rank 0 has 0 (2,) float32, rank 1 has 0 (3,) float32" in shapes
    same_on_ranks(shapes)


def _rates_of(*ours: Any, epochs: int = 2, compression: Any = Compression.none) -> tuple[list[float], Any]:
    """Learning rates as ``fit`` sees them with these callbacks; the model."""
    rates: list[float] = []

    class Recorder(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    model = fit(smooth_model(), _wrapped(compression, learning_rate=0.04), epochs, [*ours, Recorder()])
    return rates, model


def test_learning_rates_and_metrics():
    """Metrics are averaged."""
    rates, model = _rates_of(
        callbacks.LearningRateWarmupCallback(0.04, warmup_epochs=2), callbacks.MetricAverageCallback()
    )
    assert rates == pytest.approx([0.02 + 0.02 * (i + 1) / 16 for i in range(16)])
    assert len(model.history.history["lr"]) == 2
    same_on_ranks(model.history.history)
    rates, _ = _rates_of(callbacks.LearningRateScheduleCallback(0.04, lambda epoch: 0.5**epoch))
    assert rates == pytest.approx([0.04] * 8 + [0.02] * 8)
    decay = callbacks.LearningRateScheduleCallback(0.04, 0.1, start_epoch=1, staircase=False)
    rates, _ = _rates_of(decay, epochs=3)
    assert rates[:9] == pytest.approx([0.04] * 9)
    assert rates[-1] == pytest.approx(0.04 * 0.1 ** (2 + 7 / 8 - 1))
    error = error_of(lambda: callbacks.LearningRateWarmupCallback(-1.0))
    assert "initial_lr must be a positive number, got -1.0" in error


def test_the_epoch_reaches_a_density_warm_up():
    warm = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2), dense_values="fp32")
    _, model = _rates_of(*BEGIN, epochs=3, compression=warm)
    stats = model.optimizer.compression_stats()
    # two epochs of warm-up, of which the first sends 25%, 6.25% or less, and one at 1%
    assert 0.05 < stats["selected"] / stats["elements"] < 0.2
    assert "the epoch is not known" in error_of(lambda: _rates_of(compression=warm))


def test_velocity_follows_the_rate():
    """Goyal et al.: after a change of the rate, velocity / rate is what it was."""
    model, optimizer = smooth_model(), _wrapped(learning_rate=0.04)
    fit(model, optimizer, 1)
    before = optimizer.momentums[0].numpy() / 0.04
    schedule = callbacks.LearningRateScheduleCallback(0.04, lambda epoch: 0.25)
    schedule.set_model(model)
    schedule.on_epoch_begin(0)
    schedule.on_train_batch_begin(0)
    assert np.abs(optimizer.momentums[0].numpy() / 0.01 - before).max() < 1e-4


@pytest.fixture
def path(tmp_path):
    """Of a file, with a number that each rank puts in."""
    return str(tmp_path / "%d.keras")


def test_a_saved_model_is_a_stock_one(path):
    """Loaded by us it trains on."""
    path = path % hvd.rank()
    model = fitted(keras.optimizers.Adam(1e-3), FEW, epochs=1)
    model.save(path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stock, ours = keras.models.load_model(path), load_model(path, compression=FEW)
    assert not said and fingerprint(stock) == fingerprint(model) == fingerprint(ours)
    assert type(stock.optimizer).__module__ == "keras.src.optimizers.adam"
    assert int(stock.optimizer.iterations) == int(ours.optimizer.iterations) == 8
    assert hasattr(ours.optimizer, "compression_stats")
    same_on_ranks(fingerprint(fit(ours, ours.optimizer, 1)))


def test_a_dense_run_resumes_exactly_and_a_compressed_one_takes_the_velocity_over(path):
    path = path % hvd.rank()
    dense = fitted(momentum_sgd(), Compression.none, epochs=2)
    fitted(momentum_sgd(), Compression.none, epochs=1).save(path)
    resumed = load_model(path)
    assert fingerprint(fit(resumed, resumed.optimizer, 1)) == fingerprint(dense)
    resumed = load_model(path, compression=everything())
    fit(resumed, resumed.optimizer, 1)
    assert np.abs(weights(resumed) - weights(dense)).max() < 1e-5


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(3e-3)


@pytest.mark.parametrize("make", [momentum_sgd, _adam], ids=["sgd", "adam"])
def test_a_loaded_model_goes_on_as_if_it_was_not_saved(make, path):
    path = path % hvd.rank()
    model = fitted(make(), everything(), epochs=1)
    model.save(path)
    loaded = load_model(path, compression=everything())
    after = [weights(fit(each, each.optimizer, 1)) for each in (model, loaded)]
    assert np.abs(after[0] - after[1]).max() < 1e-5


def test_elastic_state_saves_restores_and_sends_weights_and_optimizer():
    model = fit(smooth_model(seed=hvd.rank()), DistributedOptimizer(keras.optimizers.Adam(1e-3)), 1)
    kept = elastic.KerasState(model, batch=3 + hvd.rank())
    before = fingerprint(model)
    fit(model, model.optimizer, 1)
    assert fingerprint(model) != before
    kept.restore()
    assert fingerprint(model) == before and kept.batch == 3 + hvd.rank()
    kept.sync()
    assert kept.batch == 3
    same_on_ranks(fingerprint(model), int(model.optimizer.iterations))


def test_what_a_rank_has_summed_of_half_a_step_goes_back_with_the_weights():
    """It is its own."""
    model = smooth_model()
    optimizer = _wrapped(everything(), gradient_accumulation_steps=2)
    model.compile(optimizer, "mse")
    x, y = shard(hvd.rank())
    model.train_on_batch(x[:16], y[:16])
    kept, at_commit = elastic.KerasState(model), [a.numpy() for a in own_variables(optimizer)]
    assert any(a.any() for a in at_commit)
    kept.sync()
    for _ in range(2):
        model.train_on_batch(x[16:32], y[16:32])
    assert any(np.any(a.numpy() != b) for a, b in zip(own_variables(optimizer), at_commit, strict=True))
    kept.restore()
    assert all(np.array_equal(a.numpy(), b) for a, b in zip(own_variables(optimizer), at_commit, strict=True))
