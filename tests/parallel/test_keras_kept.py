"""What ranks of a Keras job have kept is neither lost nor applied wrongly when variables, state or steps are others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod import WarmupSchedule
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from dgc_horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fit, keras, momentum_sgd, smooth_model, weights
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
SIZE = (64, 64)


def _variables(count: int) -> list[Any]:
    return [keras.Variable(np.zeros(SIZE, np.float32)) for _ in range(count)]


def _gradients(draws: np.random.Generator, count: int) -> list[tf.Tensor]:
    return [tf.constant((1 + 0.1 * draws.standard_normal(SIZE)).astype(np.float32)) for _ in range(count)]


def _mean_step(optimizer: Any, variables: Sequence[Any], steps: int) -> float:
    """How far an element of the first variable goes in a step, in the mean."""
    draws, moved = np.random.default_rng(hvd.rank()), 0.0
    for _ in range(steps):
        before = variables[0].numpy().copy()
        optimizer.apply(_gradients(draws, len(variables)), list(variables))
        moved += float(np.abs(variables[0].numpy() - before).mean())
    return moved / steps


@pytest.mark.parametrize("what", ["frozen", "cleared"])
def test_adams_steps_stay_of_one_size_when_a_layer_is_frozen_or_moments_are_emptied(what):
    """Ten times as large before moments knew when they began."""
    variables = _variables(2)
    compression = Compression.dgc(density=0.5, min_numel=1, values="fp32")
    optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3), compression=compression)
    optimizer.build(variables)
    before = _mean_step(optimizer, variables, 60)
    if what == "frozen":
        variables[1].trainable = False
    else:
        optimizer.clear_residuals()
    after = _mean_step(optimizer, [variable for variable in variables if variable.trainable], 10)
    assert 0.9 < after / before < 1.1 if what == "frozen" else 0.5 < after / before < 1.5


def test_the_warm_up_goes_on_when_a_layer_is_frozen():
    """Late in it."""
    variables = _variables(2)
    compression = Compression.dgc(density=0.001, min_numel=1, warmup=WarmupSchedule(steps=20))
    optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
    optimizer.build(variables)
    _mean_step(optimizer, variables, 25)
    before = optimizer.compression_stats()["selected"]
    variables[1].trainable = False
    _mean_step(optimizer, variables[:1], 5)
    assert (optimizer.compression_stats()["selected"] - before) / 5 <= 5


@pytest.mark.parametrize("options", [{"global_clipnorm": 0.1}, {"loss_scale_factor": 1024.0}])
def test_a_flush_is_not_clipped_and_not_scaled(options):
    """It applies all that waited."""
    (variable,) = _variables(1)
    sgd = keras.optimizers.SGD(1.0, **options)
    optimizer = DistributedOptimizer(sgd, compression=Compression.topk(density=0.001, min_numel=1))
    for _ in range(5):
        optimizer.apply(_gradients(np.random.default_rng(0), 1), [variable])
    waits = np.linalg.norm(optimizer.residual_state_dict()["tensors"]["0"]["v"])
    before = variable.numpy().copy()
    optimizer.flush()
    assert float(np.linalg.norm(variable.numpy() - before) / waits) == pytest.approx(1, rel=1e-3)


def test_a_flush_keeps_constraints():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(64, kernel_constraint="non_neg")])
    model.add(keras.layers.Dense(1))
    fit(model, _compressed(min_numel=1), 2)
    model.optimizer.flush()
    assert float(model.layers[0].kernel.numpy().min()) >= 0


def _compressed(**fields: Any) -> Any:
    return DistributedOptimizer(
        momentum_sgd(), compression=Compression.dgc(**{"density": 0.01, "min_numel": 16, **fields})
    )


def test_what_was_loaded_counts_before_the_first_step(tmp_path):
    """A flush applies what was loaded, clear_residuals empties it."""
    model, optimizer = smooth_model(), _compressed()
    fit(model, optimizer, 1)
    save_checkpoint(tmp_path, model, optimizer)
    optimizer.flush()
    other, resumed = smooth_model(1), _compressed()
    load_checkpoint(tmp_path, other, resumed)
    resumed.flush()
    assert float(np.abs(weights(other) - weights(model)).max()) <= 1e-6
    slots: dict[str, Any] = {}
    resumed.save_own_variables(slots)
    assert any(np.any(x) for x in slots.values() if np.ndim(x) == 2)
    cleared, emptied = smooth_model(2), _compressed()
    load_checkpoint(tmp_path, cleared, emptied)
    emptied.clear_residuals()
    emptied.apply([tf.zeros(v.shape) for v in cleared.trainable_variables], cleared.trainable_variables)
    tensors = emptied.residual_state_dict()["tensors"].values()
    assert not any(x.any() for arrays in tensors for x in arrays.values())


def test_outer_momentum_of_a_checkpoint_survives_the_broadcast_of_fit(tmp_path):
    """Local steps: what load_checkpoint has brought is there behind the callback."""
    begin = [BroadcastGlobalVariablesCallback(0)]
    models = [smooth_model(seed) for seed in (0, 1)]
    first, second = (DistributedOptimizer(momentum_sgd(), compression=Compression.local(steps=2)) for _ in models)
    fit(models[0], first, 1, begin)
    save_checkpoint(tmp_path, models[0], first)
    load_checkpoint(tmp_path, models[1], second)
    fit(models[0], first, 1)
    fit(models[1], second, 1, begin)
    assert np.array_equal(weights(models[0]), weights(models[1]))


class _OwnApply(keras.optimizers.SGD):
    """A step that Keras' own ``apply`` has no part in."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(self.learning_rate * gradient)


def test_an_apply_of_its_own_is_refused():
    (variable,) = _variables(1)
    own = DistributedOptimizer(_OwnApply(0.1))
    own.build([variable])
    error = error_of(lambda: own.apply(_gradients(np.random.default_rng(0), 1), [variable]))
    assert "steps in an apply() of its own" in error


def test_a_first_batch_that_overflows_in_eager_mode():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(1, dtype="float32")])
        scaler = keras.optimizers.LossScaleOptimizer(momentum_sgd(learning_rate=0.01), initial_scale=2.0**127)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    fit(model, DistributedOptimizer(scaler), 1, [BroadcastGlobalVariablesCallback(0)], run_eagerly=True)
    same_on_ranks(float(weights(model).sum()))


def test_an_embedding_that_one_rank_alone_uses():
    embedding, other = keras.layers.Embedding(50, 8), keras.Variable(np.ones(8, np.float32))
    embedding.build((None,))
    embedding.embeddings.assign(np.ones((50, 8)))
    variables = [embedding.embeddings, other]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(other * 2)
        if hvd.rank() == 0:
            loss += tf.reduce_sum(embedding(tf.constant([1, 2])))
    DistributedOptimizer(keras.optimizers.SGD(0.1)).apply(tape.gradient(loss, variables), variables)
    assert float(np.sum(embedding.embeddings.numpy())) == pytest.approx(400 - 0.1 * 16 / 2, abs=1e-3)


@pytest.mark.parametrize("what", ["sparse", "amsgrad"])
def test_a_choice_without_compression_keeps_its_limit(what):
    """``auto`` that ends in no compression still clips the average, as it says."""
    (variable,) = _variables(1)
    inner = keras.optimizers.SGD(1.0) if what == "sparse" else keras.optimizers.Adam(1.0, amsgrad=True)
    optimizer = DistributedOptimizer(inner, compression=Compression.auto(clip_norm=0.1))
    gradient = tf.fill(SIZE, 1.0 + hvd.rank())
    if what == "sparse":
        gradient = tf.IndexedSlices(gradient, tf.range(SIZE[0]), tf.constant(SIZE))
    optimizer.apply([gradient], [variable])
    assert session(optimizer).settings.config is None
    same_on_ranks(variable.numpy().tolist())
    moved = variable.numpy() if what == "sparse" else 10 * optimizer._momentums[0].numpy()
    assert float(np.linalg.norm(moved)) == pytest.approx(0.1, rel=1e-4)


def test_a_sum_is_saved_as_one():
    """op=Sum: the velocity in a file is that of the sum of all ranks' gradients."""
    (variable,) = _variables(1)
    compression = Compression.dgc(density=0.01, min_numel=1, factor_masking=False)
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression=compression, op=hvd.Sum)
    for _ in range(5):
        optimizer.apply([tf.ones(SIZE)], [variable])
    slots: dict[str, Any] = {}
    optimizer.save_own_variables(slots)
    velocity = next(x for x in slots.values() if np.shape(x) == SIZE)
    stock = -0.1 * hvd.size() * sum(0.9**i for i in range(5))
    assert float(np.mean(velocity)) == pytest.approx(stock, rel=1e-5)
