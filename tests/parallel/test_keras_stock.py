"""Stock Horovod 0.28.1 is silently wrong under Keras 3: should one of these fail, the README's claim is outdated."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock
import tensorflow as tf

from dgc_horovod.tensorflow import Compression, DistributedGradientTape
from tests.helpers.errors import error_of
from tests.helpers.keras_training import (
    distance,
    fingerprint,
    fit,
    fitted,
    gradients_of,
    momentum_sgd,
    shard,
    smooth_model,
)
from tests.helpers.on_ranks import same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]


def test_stock_fit_diverges_and_ours_does_not():
    same_on_ranks(fingerprint(fitted(momentum_sgd(), Compression.none)))
    model = fit(smooth_model(), stock.DistributedOptimizer(momentum_sgd()))
    first, second = hvd.allgather_object(fingerprint(model))
    assert first != second


def test_stock_tape_crashes_and_ours_does_not():
    model, (x, y) = smooth_model(), shard(hvd.rank())
    ours = [float(tf.reduce_sum(tf.abs(each))) for each in gradients_of(model, x, y, DistributedGradientTape)]
    assert min(ours) > 0
    same_on_ranks(ours)
    with pytest.raises(AttributeError, match="has no attribute 'ref'"):
        gradients_of(model, x, y, hvd.DistributedGradientTape)


@pytest.mark.parametrize("callback", ["BroadcastGlobalVariables", "MetricAverage", "LearningRateWarmup"])
def test_stock_callbacks_crash(callback):
    arguments = {"BroadcastGlobalVariables": [0], "LearningRateWarmup": [0.1]}.get(callback, [])
    made = getattr(stock.callbacks, f"{callback}Callback")(*arguments)
    assert error_of(lambda: fit(smooth_model(), momentum_sgd(), 1, [made]))
    assert distance(smooth_model(), smooth_model()) == 0
