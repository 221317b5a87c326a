"""Compression.auto in Keras on real ranks: what Keras clips, saves and fits, and what ends a trial without a choice."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, callbacks
from dgc_horovod.testing.tensorflow import session
from tests.helpers.adapters import Adapter
from tests.helpers.errors import error_told, stay_away
from tests.helpers.keras_training import BATCH, BATCHES, fingerprint, fit, keras, momentum_sgd, shard, smooth_model
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import UNROUNDED
from tests.parallel.test_auto import OPTIMIZERS, STEPS, started, stock

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
KERAS = Adapter("Keras")
PLAIN = {"nesterov": False, "weight_decay": None}
_started, _stock = partial(started, KERAS), partial(stock, KERAS)


@pytest.mark.parametrize("limit", [{"clipnorm": 0.05}, {"clipvalue": 0.001}])
def test_dense_steps_are_clipped_as_keras_clips_bit_by_bit(limit):
    run = _started(more={**PLAIN, **limit})
    run.train(STEPS)
    assert run.print == _stock(**PLAIN, **limit).print


@pytest.mark.parametrize(("fields", "limit"), [({"clip_norm": 0.1}, {}), ({}, {"global_clipnorm": 0.1})])
def test_dense_steps_are_clipped_by_a_norm_of_all(fields, limit):
    run = _started(more={**PLAIN, **limit}, **fields)
    run.train(STEPS)
    np.testing.assert_allclose(
        run.weights, _stock(**PLAIN, global_clipnorm=0.1).weights, rtol=1e-5, atol=1e-7
    )  # a sum in another order


@pytest.mark.parametrize("eagerly", [False, True])
def test_dense_steps_of_fit(eagerly):
    ends = []
    for compression in (Compression.none, Compression.auto(min_numel=16)):
        optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
        ends.append(fingerprint(fit(smooth_model(), optimizer, run_eagerly=eagerly)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("optimizer", "more"), [("SGD", {**PLAIN, "lr": 0.002}), ("AdamW", {})])
def test_the_momentum_of_sums_that_comes_back_is_of_the_size_that_went(optimizer, more):
    run = _started(optimizer, more=more, density=0.5, wrap={"op": hvd.Sum})
    momentum = []
    for mode in (DENSE, COMPRESSED, DENSE):
        run.take(mode)
        for _ in range(STEPS // 3):
            momentum.append(float(np.linalg.norm(run.optimizer.variables[2].numpy())))  # of the first variable
            run.step()
    assert 0.3 < momentum[-1] / max(momentum[: STEPS // 3]) < 3
    same_on_ranks(run.print)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_weights_of_other_dtypes(dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        run = _started(more=PLAIN)
    finally:
        keras.config.set_dtype_policy("float32")
    for mode in (DENSE, COMPRESSED, DENSE, COMPRESSED, COMPRESSED, DENSE):
        run.take(mode)
        run.train(STEPS // 6)
    assert np.isfinite(run.weights.astype(np.float32)).all()
    same_on_ranks(run.print)


def test_a_limit_that_would_cut_what_is_handed_back():
    more = {**PLAIN, "momentum": 0.0, "lr": 0.01, "clipvalue": 1e-6}
    run = _started(more=more, factor_masking=False, **UNROUNDED)
    for mode in (COMPRESSED, DENSE):
        run.take(mode)
        run.train(STEPS // 2)
    same_on_ranks(run.print)


def test_learning_rates_that_a_callback_sets():
    teller = callbacks.LearningRateScheduleCallback(0.05, lambda epoch: 0.5 if epoch else 1.0, staircase=True)
    x, y = shard(hvd.rank())
    run, reference = _started(), KERAS.start(None, **OPTIMIZERS["SGD"])
    for each in (run, reference):
        each.model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[teller])
    assert run.print == reference.print


def test_a_checkpoint_of_no_step_has_chosen_nothing(tmp_path):
    _started("AdamW", mode=None).save(tmp_path)
    resumed = _started("AdamW", mode=None, seed=5)
    resumed.load(tmp_path)
    resumed.train(3)
    assert (resumed.choice.mode, resumed.choice.ended) == (DENSE, False)
    same_on_ranks(resumed.print)


def _handed_over(optimizer: Any) -> bool:
    """Whether a saved optimizer has momentum that its own slots do not have."""
    saved: dict[str, Any] = {}
    optimizer.save_own_variables(saved)
    return any(bool(np.any(saved[str(i)] != x.numpy())) for i, x in enumerate(optimizer.variables))


def test_a_trial_that_was_interrupted_begins_anew_and_loses_nothing(tmp_path):
    """It is saved in the middle, with all that was kept; a stock file of it is whole."""
    run = _started(mode=None, factor_masking=False, **UNROUNDED)
    run.choice.decide(1.0, 0.1)
    run.train(4)
    assert _handed_over(run.optimizer)
    run.save(tmp_path)
    resumed = _started(mode=None, factor_masking=False, **UNROUNDED)
    resumed.load(tmp_path)
    resumed.steps = 4
    resumed.train(3)
    assert (resumed.choice.mode, resumed.choice.ended) == (DENSE, False)
    run.take(DENSE)
    run.train(3)
    assert resumed.print == run.print and not _handed_over(run.optimizer)
    same_on_ranks(run.print)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_what_waits_of_variables_goes_with_them_to_another_set(name):
    """Other variables in mid-run end a trial without a choice; stock Horovod's exchange stays."""
    run = _started(name)
    run.train(1)
    run.take(COMPRESSED)
    run.train(3)
    variables = run.model.trainable_variables[2:]
    assert any(x.any() for i, parts in run.kept().items() if int(i) > 1 for x in parts.values())
    before = run.print
    run.optimizer.apply([tf.zeros(v.shape) for v in variables], variables)  # a layer is frozen, as it were
    assert run.print != before
    path = variables[0].path.replace("/", "_")
    assert any(slot.numpy().any() for slot in run.optimizer.variables if path in slot.path)
    run.train(3)
    assert [each.choice.mode for each in run.session.exchanges] == [DENSE, DENSE]
    assert np.isfinite(run.weights).all()
    same_on_ranks(run.print)


def test_a_tape_is_left_to_stock_horovod():
    model = smooth_model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((4, 32))) ** 2) * (1 + hvd.rank())
    tape = DistributedGradientTape(tape, compression=Compression.auto())
    found = float(tape.gradient(loss, model.trainable_variables)[0].numpy().sum())
    assert found != 0
    same_on_ranks(found)


@pytest.mark.parametrize(("epochs", "wanted"), [(2, (16, 1.0, True)), (500, (4000, 0.005, False))])
def test_fit_says_how_many_steps_there_are(epochs, wanted):
    """From which the density follows."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.auto(min_numel=16))
    fit(smooth_model(), optimizer, epochs, [callbacks.BroadcastGlobalVariablesCallback(0), Stop()])
    config = session(optimizer).settings.config
    assert wanted[0] == epochs * BATCHES
    assert (config.total_steps, config.density, session(optimizer).choice.ended) == wanted


@pytest.mark.on_ranks(2, environment={"DGC_TIMEOUT": "10"}, fresh=True)
def test_ranks_with_uneven_data_choose_alike_and_one_that_stays_away_is_an_error_not_a_hang(tmp_path):
    hvd.init()
    run = _started(mode=None)
    run.train(10 + 30 * hvd.rank())  # the other rank comes to its comparison alone
    hvd.join()
    assert (run.choice.mode, run.choice.ended) == (DENSE, True)
    hvd.init()  # again: its shutdown at exit must not meet ours all the same
    run = _started(mode=None)
    run.train(3)
    run.choice.decide(1.0, 0.1)  # what was found in the last step
    run.train(4 * hvd.rank())
    hvd.join()
    assert run.session.choice.given_up and not run.session.exchange.compresses
    if hvd.rank() == 0:
        gradients = [np.ones(array.shape, np.float32) for array in run.arrays]
        assert "waited 10 s for" in error_told(lambda: run.apply(gradients), tmp_path)
    else:
        stay_away(tmp_path)
