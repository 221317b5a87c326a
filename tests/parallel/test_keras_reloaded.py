"""Weights that are loaded in the middle of a run have nothing to do with what ranks had kept for those before."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow import broadcast_variables
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.keras_training import fingerprint, keras, momentum_sgd, smooth_model, train, weights
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(density=0.02, min_numel=16)
WAYS: dict[str, Any] = {
    "dgc": lambda: (momentum_sgd(), FEW),
    "topk": lambda: (momentum_sgd(), Compression.topk(density=0.02, min_numel=16)),
    "adam": lambda: (keras.optimizers.Adam(3e-3), FEW),
    "scaled": lambda: (keras.optimizers.LossScaleOptimizer(momentum_sgd()), FEW),
    "local": lambda: (momentum_sgd(), Compression.local(steps=4, density=0.1)),
    "auto": lambda: (momentum_sgd(), Compression.auto()),
}


def _optimizer(way: str) -> Any:
    inner, compression = WAYS[way]()
    return DistributedOptimizer(inner, compression=compression)


def _trained(way: str, steps: int = 3, seed: int = 0) -> Any:
    model = smooth_model(seed)
    model.compile(_optimizer(way), "mse")
    train(model, steps)
    return model


def _inner(model: Any) -> Any:
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def _slots(optimizer: Any) -> np.ndarray:
    return np.concatenate([slot.numpy().ravel() for slot in optimizer.variables if slot.shape.rank])


def _kept(optimizer: Any) -> float:
    """How much this rank has of gradients that the model has not had."""
    tensors = optimizer.residual_state_dict()["tensors"].values()
    return float(sum(np.abs(x).sum() for arrays in tensors for part, x in arrays.items() if part == "v"))


@pytest.mark.parametrize("way", ["dgc", "topk", "adam", "scaled", "local"])
def test_what_was_loaded_is_saved_and_not_flushed_away(way, tmp_path):
    """A flush had moved the loaded weights, and files had had the velocity of the weights before."""
    file, whole = tmp_path / f"{hvd.rank()}.weights.h5", tmp_path / f"{hvd.rank()}.keras"
    model = _trained(way)
    model.save_weights(file)
    saved, velocity = weights(model), {}
    _inner(model).save_own_variables(velocity)
    if way == "local":  # the file of one rank
        saved = hvd.broadcast(tf.constant(saved), 0, name="saved").numpy()
    train(model, 6)
    if way == "local":  # of local steps it is known between two rounds
        model.optimizer.exchange()
    assert _kept(_inner(model)) > 0
    model.load_weights(file)
    if way == "local":
        broadcast_variables(model.variables, 0)
    model.save(whole)
    before = np.concatenate([x.ravel() for x in velocity.values() if np.ndim(x)])
    assert np.array_equal(_slots(_inner(keras.models.load_model(whole))), before)
    model.optimizer.flush()
    assert np.array_equal(weights(model), saved) and np.array_equal(_slots(_inner(model)), before)
    assert _kept(_inner(model)) == 0
    with messages() as said:
        train(model, 1)
    assert len([text for text in said if "checkpoint was loaded" in text]) == (hvd.rank() == 0)
    same_on_ranks(fingerprint(model) if way != "local" else "")


def test_a_checkpoint_brings_what_it_has(tmp_path):
    """What load_checkpoint brings later is not touched; weights that are loaded behind it have nothing of it."""
    file = tmp_path / f"{hvd.rank()}.weights.h5"
    model = _trained("dgc")
    model.save_weights(file)
    train(model, 6)
    save_checkpoint(tmp_path / "ours", model)
    waits = _kept(model.optimizer)
    model.load_weights(file)
    load_checkpoint(tmp_path / "ours", model)
    assert _kept(model.optimizer) == waits
    new = _trained("dgc", 0, seed=5)
    load_checkpoint(tmp_path / "ours", new)
    new.load_weights(file)
    assert _kept(new.optimizer) == 0


def test_what_was_loaded_is_what_a_checkpoint_has(tmp_path):
    """It had had what waited for the weights before."""
    file = tmp_path / f"{hvd.rank()}.weights.h5"
    model = _trained("dgc")
    model.save_weights(file)
    train(model, 6)
    model.load_weights(file)
    save_checkpoint(tmp_path / "ours", model)
    resumed = _trained("dgc", 0, seed=5)
    load_checkpoint(tmp_path / "ours", resumed)
    assert _kept(resumed.optimizer) == 0
    broadcast_variables(model.optimizer.variables, 0)  # the checkpoint has those of the first rank
    for each in (model, resumed):
        train(each, 3)
    assert fingerprint(model) == fingerprint(resumed), "resumed from the checkpoint it is another run"


def test_one_rank_may_load_for_all(tmp_path):
    """What the others had kept had gone into the weights that were sent to them."""
    model = _trained("dgc")
    saved = weights(model)
    file = tmp_path / f"{hvd.rank()}.weights.h5"
    model.save_weights(file)
    train(model, 6)
    if hvd.rank() == 0:
        model.load_weights(file)
    for variables in (model.variables, model.optimizer.variables):
        broadcast_variables(variables, 0)
    model.optimizer.flush()
    assert np.array_equal(weights(model), saved)
    train(model, 3)
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize("way", ["dgc", "adam", "scaled", "local"])
def test_slots_that_are_set_are_taken_over(way):
    """They had stayed where they were, of no effect; at the next step, and what waited is gone."""
    model = _trained(way, 4)
    optimizer = _inner(model)
    values = [np.ones_like(v) if v.ndim == 2 else v for v in (each.numpy() for each in optimizer.variables)]
    if way == "scaled":
        model.optimizer.set_weights([each.numpy() for each in model.optimizer.variables])
    optimizer.set_weights(values)
    assert _kept(optimizer) == 0
    slots: dict[str, Any] = {}
    optimizer.save_own_variables(slots)
    assert all(np.array_equal(slots[str(i)], value) for i, value in enumerate(values))
    train(model, 1)
    kernels = [slot.numpy() for slot in optimizer.variables if slot.shape.rank == 2 and slot.shape[1] > 1]
    assert any(kernel.any() for kernel in kernels) == (way == "local")


@pytest.mark.parametrize("way", ["dgc", "topk", "adam", "auto"])
def test_weights_of_one_step_ago_are_noticed(way):
    """Weights and iterations are assigned: what the dropped step had left had been applied to them."""
    draws, variable, optimizer = np.random.default_rng(hvd.rank()), tf.Variable(tf.zeros((40, 50))), _optimizer(way)
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    with messages() as said:
        for _ in range(3):
            apply(tf.constant(draws.standard_normal((40, 50)), tf.float32))
        early = [text for text in said if "checkpoint was loaded" in text]
        at, iterations = variable.numpy(), optimizer.iterations.numpy()
        apply(tf.constant(draws.standard_normal((40, 50)), tf.float32))
        variable.assign(at)
        optimizer.iterations.assign(iterations)
        if way != "auto":
            apply(tf.zeros((40, 50)))
    later = [text for text in said if "checkpoint was loaded" in text]
    assert not early and len(later) == (hvd.rank() == 0 and way != "auto")
    assert all("the optimizer is at iteration 3" in text for text in later)
    assert way == "topk" or np.array_equal(variable.numpy(), at)
