"""Errors of the TensorFlow adapter: the same on every rank, with what to do; nothing hangs."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock
import numpy as np
import tensorflow as tf
from horovod.tensorflow import join as stock_join

from dgc_horovod import DGCConfig
from dgc_horovod.compression import ConfiguredCompressor
from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow import DistributedOptimizer as TensorFlowOptimizer
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.keras_training import (
    fingerprint,
    fit,
    fitted,
    gradients_of,
    keras,
    momentum_sgd,
    shard,
    smooth_model,
)
from tests.helpers.logs import messages
from tests.helpers.metrics_file import check_metrics_file
from tests.helpers.on_ranks import on_ranks, same_on_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
DGC = Compression.dgc(0.05)


def _variable(value: float = 1.0) -> Any:
    return keras.Variable(tf.fill((40, 50), value))


def _sgd(compression: Any = DGC) -> Any:
    return DistributedOptimizer(momentum_sgd(), compression=compression)


def _in_xla() -> None:
    wrapped, variable = _sgd(), _variable()
    tf.function(lambda gradient: wrapped.apply([gradient], [variable]), jit_compile=True)(tf.ones((40, 50)))


def _scaler_outside() -> None:
    keras.optimizers.LossScaleOptimizer(_sgd()).apply([tf.ones((40, 50))], [_variable()])


REFUSED: dict[str, Callable[[], Any]] = {
    "already a DistributedOptimizer": lambda: DistributedOptimizer(_sgd(), compression=DGC),
    "Compression.dgc(density=0.001)": lambda: _sgd(Compression.dgc),
    "op must be hvd.Average or hvd.Sum": lambda: DistributedOptimizer(momentum_sgd(), op=hvd.Adasum),
    "goes with op=hvd.Average only": lambda: DistributedOptimizer(
        momentum_sgd(), op=hvd.Sum, gradient_predivide_factor=2.0
    ),
    "backward_passes_per_step must be a whole number >= 1, got 0": lambda: DistributedOptimizer(
        momentum_sgd(), backward_passes_per_step=0
    ),
    "leave backward_passes_per_step at 1": lambda: DistributedOptimizer(
        momentum_sgd(gradient_accumulation_steps=2), backward_passes_per_step=2
    ),
    "use amsgrad=False": lambda: DistributedOptimizer(keras.optimizers.Adam(amsgrad=True), compression=DGC),
    "pass jit_compile=False": _in_xla,
    "DistributedOptimizer(LossScaleOptimizer(optimizer))": _scaler_outside,
    "pass the compression as compression=...": lambda: TensorFlowOptimizer(momentum_sgd(), DGC),
    "import Compression from dgc_horovod.tensorflow": lambda: _sgd(ConfiguredCompressor("torch", DGCConfig())),
    "wrap the Keras optimizer itself": lambda: DistributedOptimizer(stock.DistributedOptimizer(momentum_sgd())),
    "already a DistributedGradientTape": lambda: DistributedGradientTape(DistributedGradientTape(tf.GradientTape())),
    "must be a Keras 3 optimizer": lambda: DistributedOptimizer("sgd"),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_is_refused(told):
    assert told in error_of(REFUSED[told])


@pytest.mark.parametrize("what", ["model", "tape"])
def test_ranks_that_disagree_hear_the_same(what):
    first, (x, y) = hvd.rank() == 0, shard(hvd.rank())
    if what == "tape":
        compression, told = Compression.topk(0.05 if first else 0.1), "density=0.05, rank 1 has density=0.1"
        error = error_of(
            lambda: gradients_of(smooth_model(), x, y, lambda t: DistributedGradientTape(t, compression=compression))
        )
    else:
        told = "variable count: rank 0 has 8, rank 1 has 2"
        model = smooth_model() if first else keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(1)])
        error = error_of(lambda: fit(model, _sgd(Compression.none), 1))
    assert told in error
    same_on_ranks(error)


def test_a_metrics_file_that_cannot_be_written_is_told_to_all():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DGC_METRICS_FILE", f"{os.devnull}/metrics.jsonl")
        error = error_of(lambda: fitted(momentum_sgd(), DGC, epochs=1))
    assert "refused: rank 0 has the metrics file" in error and "rank 1 has nothing" in error
    afterwards = fingerprint(fitted(momentum_sgd(), DGC, epochs=1))
    same_on_ranks(error, afterwards)


def test_weights_that_are_not_finite_are_named_by_a_tape():
    """Gradients were blamed, and every step was skipped to the end."""
    variable = tf.Variable(tf.fill((40, 50), np.nan))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    with messages() as said:
        DistributedGradientTape(tape, compression=Compression.topk(0.05)).gradient(loss, [variable])
    told = "; ".join(text for text in said if "weights" in text)
    assert hvd.rank() or re.search(
        r"step 0: the weights of 'Variable\S*' are not finite, and so gradients are not", told
    )


def test_adafactor_of_keras():
    """It is refused where it would make such weights."""

    def told(compression: Any) -> str:
        """Its error, or what is said of the choice."""
        model, (x, y) = smooth_model(), shard(hvd.rank())

        def steps() -> None:
            optimizer = DistributedOptimizer(keras.optimizers.Adafactor(0.01), compression=compression)
            for _ in range(3):
                optimizer.apply(gradients_of(model, x, y), model.trainable_variables)

        with messages() as said:
            error = error_of(steps)
        return error or "; ".join(text for text in said if "weights" in text or "stays" in text)

    assert told(Compression.topk(0.05)).startswith("UnsupportedUse: Adafactor of Keras divides by")
    assert not told(Compression.dgc(1.0)) and not told(Compression.local(2))
    chosen = told(Compression.auto())
    assert hvd.rank() or ("stock Horovod stays" in chosen and "Adafactor" in chosen)


def stats_in_a_set() -> dict[str, float]:
    """In a set that holds rank 0 only: rank 1 trains by itself."""
    only = hvd.ProcessSet([0])
    hvd.init(process_sets=[only])
    model = fitted(momentum_sgd(), DGC, epochs=1, process_set=only)
    hvd.allreduce(tf.zeros(1), name="all_done")  # a rank that leaves early takes the process sets with it
    return model.optimizer.compression_stats()


@pytest.mark.slow
@pytest.mark.on_ranks(0)
def test_a_set_of_ranks(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    first, second = on_ranks(stats_in_a_set, environment={"DGC_METRICS_FILE": str(metrics)}, fresh=True)
    check_metrics_file(metrics, "dgc")
    assert first["selected"] > 0 and first["steps"] == 8
    looked_at = {"gradient_norm", "residual_norm", "residual_ratio", "staleness_mean", "staleness_99"}  # of a step
    assert second.keys() == first.keys() - looked_at and not any(second.values())


@pytest.mark.on_ranks(2, environment={"DGC_TIMEOUT": "5"}, fresh=True)  # where no compressed tape has been used
def test_uneven_data_with_join():
    """Horovod's background loop had ended with "unordered_map::at"."""
    hvd.init()
    ones = tf.ones((40, 50))
    gc.disable()
    variable, dropped = _variable(), _sgd(DGC)  # it is gone on the first rank, and still in memory on the other
    dropped.apply([ones], [variable])
    dropped.itself = dropped
    del dropped
    if hvd.rank() == 0:
        gc.collect()
    for name, compression in {"none": Compression.none, "dgc": DGC}.items():
        variable, optimizer = _variable(), _sgd(compression)
        # uneven data are Horovod's own where nothing is compressed, and no compressed optimizer has been used
        for _ in range(2 if name == "dgc" else 2 + hvd.rank()):
            optimizer.apply([ones], [variable])
        last = int(hvd.join())
        assert name == "dgc" or last == 1
        same_on_ranks(last)
    start = time.monotonic()
    if hvd.rank() == 0:
        said = error_of(stock_join)
        assert "UnsupportedUse: hvd.join(): another rank did not call it" in said
        assert "give every rank the same number of steps" in said and "or use compression none" in said
    else:
        said = error_of(lambda: optimizer.apply([ones], [variable]))
        expected = ("has fewer steps", "is in hvd.join()", "Horovod has")  # whichever rank's time is over first
        assert any(words in said for words in expected), said
    assert time.monotonic() - start < 15
