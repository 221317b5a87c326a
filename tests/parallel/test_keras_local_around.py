"""Around Keras' local steps the ranks stay together: load, broadcast, freeze, accumulate, overflow."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import DistributedGradientTape, broadcast_variables
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, callbacks, load_checkpoint, save_checkpoint
from dgc_horovod.testing.tensorflow import session
from tests.helpers.adapters import Adapter
from tests.helpers.errors import error_of
from tests.helpers.keras_training import BATCH, fit, keras, shard, smooth_model, train, weights
from tests.helpers.logs import messages

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
H = 4


def _wrapped(optimizer: Any = None, **fields: Any) -> Any:
    compression = Compression.local(**{"steps": H, "density": 0.1, **fields})
    return DistributedOptimizer(optimizer or keras.optimizers.AdamW(2e-3), compression=compression)


def _compiled(seed: int = 0, frozen: bool = False, **fields: Any) -> Any:
    model = smooth_model(seed)
    model.layers[0].trainable = not frozen
    model.compile(_wrapped(**fields), "mse")
    return model


def _apart(values: Any) -> float:
    """How far the ranks are apart in a vector, at most."""
    return Adapter("Keras").apart(np.float32(values))


def _variable(constraint: Any = None) -> Any:
    variable = keras.Variable(tf.ones((40, 50)))
    variable.constraint = constraint
    return variable


def _apply(optimizer: Any, variable: Any, times: int) -> None:
    for i in range(times):
        gradient = np.random.default_rng(10 * i + hvd.rank()).standard_normal((40, 50))
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])


def test_accumulated_passes_are_one_step():
    """A round had lasted H steps of H passes, and each pass of the step that ended it had been an exchange.

    At the end of a job what was not exchanged is counted; and what the optimizer clips is told.
    """
    variable = _variable()
    optimizer, exchanged = _wrapped(keras.optimizers.SGD(0.1, clipnorm=1.0, gradient_accumulation_steps=2)), []
    with messages() as said:
        for _ in range(4 * H):
            _apply(optimizer, variable, 1)
            exchanged.append(optimizer.compression_stats()["steps"])
    assert sum("sqrt(N)*1 = 1.41" in text for text in said) == (hvd.rank() == 0)
    assert exchanged == [0] * (2 * H - 1) + [1] * 2 * H + [2]
    assert optimizer.compression_stats()["bytes_dense"] == 2 * H * variable.numpy().nbytes
    optimizer.flush()
    assert _apart(variable) == 0
    _apply(optimizer, variable, 3)
    counts = session(optimizer).exchange.steps.counts
    counts.close()
    assert counts.pending == 1


def test_a_broadcast_after_the_first_step_leaves_the_ranks_together():
    """Horovod's way with loops of one's own: each rank had gone on from weights of its own."""
    model = _compiled(hvd.rank())
    train(model, 1)
    for variables in (model.variables, model.optimizer.variables):
        broadcast_variables(variables, 0)
    train(model, 2 * H - 1)
    assert _apart(weights(model)) == 0


def test_a_model_that_its_first_batch_builds():
    keras.utils.set_random_seed(hvd.rank())
    late = keras.Sequential([keras.layers.Dense(96, activation="tanh"), keras.layers.Dense(1)])
    fit(late, _wrapped(), 1, callbacks=[callbacks.BroadcastGlobalVariablesCallback(0)])
    assert _apart(weights(late)) == 0


def test_weights_loaded_in_a_round_are_gone_on_with(tmp_path):
    """By every rank, by one and broadcast, set by the script.

    Where one rank had loaded, outer momentum and the round's begin were its own.
    """
    model, optimizer = smooth_model(), _wrapped(outer_momentum=0.9, outer_rate=0.7)
    fit(model, optimizer, 2)
    file, saved = tmp_path / f"{hvd.rank()}.weights.h5", weights(model)
    model.save_weights(file)
    train(model, H + 2)
    model.load_weights(file)
    optimizer.exchange()
    assert np.array_equal(weights(model), saved)
    train(model, H + 2)
    if hvd.rank() == 0:
        model.load_weights(file)
    x, y = shard(hvd.rank())
    begin = [callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x[: 4 * BATCH], y[: 4 * BATCH], batch_size=BATCH, verbose=0, shuffle=False, callbacks=begin)
    optimizer.exchange()
    assert _apart(weights(model)) == 0
    train(model, 2)
    model.set_weights(smooth_model(7).get_weights())
    optimizer.clear_residuals()
    optimizer.exchange()
    assert np.array_equal(weights(model), weights(smooth_model(7)))


def test_a_layer_that_is_frozen_in_a_round_stays():
    model, optimizer = smooth_model(), _wrapped()
    fit(model, optimizer, 1)
    before = model.layers[0].kernel.numpy()
    train(model, 2)
    model.layers[0].trainable = False
    model.compile(optimizer, "mse")
    train(model, 2 * H - 2)
    assert np.array_equal(model.layers[0].kernel.numpy(), before) and _apart(weights(model)) == 0


def test_sets_of_variables_may_take_turns():
    one, other, turns = _variable(), _variable(), _wrapped(keras.optimizers.SGD(0.1))
    turns.build([one, other])
    for i in range(2 * H):
        _apply(turns, (one, other)[i % 2], 1)
    assert _apart(np.stack([one, other])) == 0
    assert all((variable.numpy() != 1).any() for variable in (one, other))


def test_what_was_loaded_is_flushed_before_the_first_step_with_a_layer_frozen_since(tmp_path):
    """It was frozen since the checkpoint was begun; it is loaded to be flushed and saved."""
    model = _compiled()
    train(model, H)
    model.layers[0].trainable = False
    model.compile(model.optimizer, "mse")
    train(model, H)
    save_checkpoint(tmp_path, model)
    other = _compiled(1, frozen=True)
    other.optimizer.build(other.weights)
    load_checkpoint(tmp_path, other)
    other.optimizer.flush()


def test_constraints_and_a_limit_that_is_set_later_are_the_inner_optimizers():
    variable = _variable(keras.constraints.UnitNorm())
    optimizer = _wrapped(keras.optimizers.SGD(0.1, momentum=0.9), outer_momentum=0.9)
    _apply(optimizer, variable, 2 * H)
    np.testing.assert_allclose(np.linalg.norm(variable.numpy(), axis=0), 1, atol=1e-5)
    optimizer.global_clipnorm = 1e-3
    assert float(tf.norm(optimizer._clip_gradients([tf.ones((40, 50))])[0])) == pytest.approx(1e-3)


def test_momentum_follows_the_learning_rate():
    """And an exchange may be made in a graph."""
    variable, model = _variable(), smooth_model()
    optimizer = _wrapped(keras.optimizers.SGD(0.1, momentum=0.9), outer_momentum=0.9)
    _apply(optimizer, variable, 2 * H)
    velocity = np.abs(optimizer.momentums[0].numpy()).sum()
    model.compile(optimizer, "mse")
    rates = callbacks.LearningRateScheduleCallback(0.1, 0.5)
    rates.set_model(model)
    rates.on_epoch_begin(1)
    rates.on_train_batch_begin(0)
    assert float(np.abs(optimizer.momentums[0].numpy()).sum() / velocity) == pytest.approx(0.5)
    _apply(optimizer, variable, 2)
    assert _apart(variable) > 0
    tf.function(optimizer.exchange)()
    assert _apart(variable) == 0


def test_variables_of_each_rank_alone_are_not_exchanged():
    """All of them."""
    variable, optimizer = _variable(), _wrapped()
    optimizer.register_local_var(variable)
    _apply(optimizer, variable, H)
    assert _apart(variable) > 0
    optimizer.exchange()


def test_what_cannot_be_is_said():
    assert "use_ema" in error_of(lambda: _wrapped(keras.optimizers.Adam(use_ema=True)))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(2e-3))
    assert "mixed_bfloat16" in error_of(lambda: _wrapped(scaled))
    taped = error_of(lambda: DistributedGradientTape(tf.GradientTape(), compression=Compression.local(2)))
    assert "DistributedOptimizer" in taped
    variable, optimizer = _variable(), _wrapped()
    _apply(optimizer, variable, 1)
    assert "before the first step" in error_of(lambda: optimizer.register_local_var(variable))
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        assert "mixed_bfloat16" in error_of(_compiled)
    finally:
        keras.mixed_precision.set_global_policy("float32")
