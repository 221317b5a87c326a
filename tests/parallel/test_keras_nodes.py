"""Nodes of several workers, and elements that have owners, under Keras: what test_nodes.py shows for PyTorch."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.keras import Compression
from dgc_horovod.testing.tensorflow import session
from tests.helpers.adapters import Adapter
from tests.helpers.keras_training import alone, distance, fingerprint, fitted, keras, momentum_sgd, weights
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import everything
from tests.parallel import test_state

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(4, nodes=2, timeout=500)]
FIELDS: dict[str, Any] = {"min_numel": 16, "exchange": "hierarchical"}
FEW = Compression.dgc(density=0.02, **FIELDS)


def _sparse(optimizer: Any) -> list[Any]:
    return [engine for engine in session(optimizer).buckets.engines if not engine.bucket.uncompressed]


def test_each_worker_keeps_half_and_flush_leaves_nothing():
    model = fitted(momentum_sgd(), FEW)
    engines = _sparse(model.optimizer)
    every = sum(engine.whole.numel for engine in engines)
    assert sum(engine.state.v.size for engine in engines) == -(-every // 2)
    assert model.optimizer.compression_stats()["bytes_inside_node"] > 24 * every * 4 / 2
    before = weights(model)
    model.optimizer.flush()
    assert float(np.abs(weights(model) - before).max()) > 1e-4
    assert not any(engine.state.v.any() for engine in session(model.optimizer).buckets.engines)
    same_on_ranks(fingerprint(model))


def test_adam_knows_the_same_on_every_rank():
    adam = fitted(keras.optimizers.Adam(0.003), FEW, epochs=2)
    slots: dict[str, np.ndarray] = {}
    adam.optimizer.save_own_variables(slots)
    second = session(adam.optimizer).buckets.second.packed()
    same_on_ranks(fingerprint(adam), second.tolist(), [float(x.sum()) for x in slots.values() if np.ndim(x) == 2])


def test_at_density_1_it_is_one_process_on_all_data():
    """Everything sent and nothing masked."""
    for make in (
        lambda: keras.optimizers.SGD(0.05),
        lambda: momentum_sgd(nesterov=True, weight_decay=1e-3),
        momentum_sgd,
    ):
        dense = alone(make())
        for clip_norm in (None, 1e6):
            ours = fitted(make(), everything(clip_norm=clip_norm, exchange="hierarchical"))
            assert distance(dense, ours) <= 1e-5
    assert distance(dense, fitted(momentum_sgd(), everything(clip_norm=0.01, exchange="hierarchical"))) > 1e-3


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    same = test_state.test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit
    same(Adapter("Keras"), "clipped, per tensor", "AdamW", 24, tmp_path)


def test_a_node_that_has_ended_does_not_end_the_last_step_of_another():
    """The script ends with a step, whose last round takes the first node longer."""
    if hvd.rank() < 2:
        quick = Collectives.allgather

        def slow(self: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
            if ".inside" in self.tag:
                with tf.control_dependencies([tf.py_function(lambda: time.sleep(0.5), [], [])]):
                    tensor = tf.identity(tensor)
            return quick(self, tensor, name)

        Collectives.allgather = slow
    same_on_ranks(fingerprint(fitted(momentum_sgd(), FEW, epochs=1)))


@pytest.mark.on_ranks(4)
def test_elements_have_owners():
    model = fitted(momentum_sgd(), Compression.dgc(density=0.05, min_numel=16, exchange="sharded"), epochs=30)
    (sparse,) = _sparse(model.optimizer)
    assert [collective.name for collective in sparse.exchange.rounds] == ["slots", "shards"]
    before = weights(model)
    assert np.abs(sparse.state.remainder).sum() > 0
    model.optimizer.flush()
    assert float(np.abs(weights(model) - before).max()) > 1e-5 and not sparse.state.full_vector("v").any()
    same_on_ranks(fingerprint(model))
