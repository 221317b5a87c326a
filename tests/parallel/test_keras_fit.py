"""Keras 3 on real ranks: replicas, dense training, density 1. Stock Horovod fails here: test_keras_stock.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

import horovod.tensorflow as hvd

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, WarmupSchedule
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import (
    alone,
    distance,
    fingerprint,
    fit,
    fitted,
    keras,
    momentum_sgd,
    smooth_model,
)
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import everything

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
on_more_ranks = pytest.mark.parametrize(
    ("controller", "workers"),
    [
        ("gloo", 2),
        pytest.param("gloo", 3, marks=pytest.mark.slow),
        pytest.param("mpi", 2, marks=[pytest.mark.mpi, pytest.mark.slow]),  # Keras over MPI: test_keras_messages.py
    ],
)
SAME = 1e-5
CHOICES = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "dgc": Compression.dgc(0.05),
    "gaussian": Compression.gaussian(0.05),
    "dgc, warm-up": Compression.dgc(0.01, warmup=WarmupSchedule(steps=12)),
    "dgc, clipped": Compression.dgc(0.05, clip_norm=0.5),
}


@on_more_ranks
def test_replicas_are_bit_identical(controller, workers):
    """And what each choice sends."""
    stats = {}
    for name, compression in CHOICES.items():
        model = fitted(momentum_sgd(), compression)
        same_on_ranks(fingerprint(model))
        stats[name] = model.optimizer.compression_stats()
    assert stats["none"]["bytes_sent"] == stats["none"]["bytes_dense"] == 2 * stats["fp16"]["bytes_sent"]
    for name in ("dgc", "gaussian"):
        assert 0.03 < stats[name]["selected"] / stats[name]["elements"] < 0.06
        assert 15 < stats[name]["bytes_dense"] / stats[name]["bytes_sent"] < 40
    assert stats["dgc, warm-up"]["selected"] > 2 * 0.01 * stats["dgc, warm-up"]["elements"]


@functools.cache
def _one_process() -> Any:
    return alone(momentum_sgd())


@on_more_ranks
def test_density_one_is_dense(controller, workers):
    """No masking, fp32, constant learning rate: SGD is dense SGD."""
    wrong = distance(_one_process(), fitted(momentum_sgd(), Compression.dgc(0.05)))
    assert wrong > 1e-3, "a compressed run equals a dense one: it was silently dense"
    for options in ({}, {"nesterov": True, "weight_decay": 1e-2}):
        dense = alone(momentum_sgd(**options)) if options else _one_process()
        assert distance(dense, fitted(momentum_sgd(**options), everything())) <= SAME, options


def _adam(**options: Any) -> Any:
    return keras.optimizers.Adam(3e-3, **options)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": momentum_sgd,
    "adam": _adam,
    "sgd, nesterov, decay": lambda: momentum_sgd(nesterov=True, weight_decay=1e-2),
    "adamw, schedule": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(3e-3, 10, 0.5)),
    "rmsprop, global_clipnorm": lambda: keras.optimizers.RMSprop(1e-3, global_clipnorm=0.5),
    "sgd, clipnorm, ema": lambda: momentum_sgd(clipnorm=0.5, use_ema=True),
    "adam, accumulation": lambda: _adam(gradient_accumulation_steps=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dense_is_one_process_with_the_whole_batch(name):
    assert distance(alone(OPTIMIZERS[name]()), fitted(OPTIMIZERS[name](), Compression.none)) <= SAME


@pytest.mark.slow
def test_fp16_is_nearly_so():
    assert 0 < distance(_one_process(), fitted(momentum_sgd(), Compression.fp16)) < 2e-3


ARGUMENTS: dict[str, dict[str, Any]] = {
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "sum": {"op": hvd.Sum},
    "passes averaged": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    "passes summed": {"backward_passes_per_step": 2},
    "eager": {"compiled": {"run_eagerly": True}},
    "steps_per_execution": {"compiled": {"steps_per_execution": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["dense", "density 1"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_options_and_arguments(name, way):
    dense = alone(momentum_sgd(gradient_accumulation_steps=2)) if "passes" in name else _one_process()
    summed = {"sum": hvd.size(), "passes summed": 2}.get(name, 1)
    compression = Compression.none if way == "dense" else everything()
    model = fitted(momentum_sgd(learning_rate=0.05 / summed), compression, **ARGUMENTS[name])
    assert distance(dense, model) <= SAME


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of `everything` and of SGD
    "many buckets": ({"bucket_bytes": 4096}, {}),
    "gaussian": ({"rule": "gaussian"}, {}),
    "no momentum correction": ({"momentum_correction": False}, {}),
    "no momentum": ({}, {"momentum": 0.0}),
    "ema": ({}, {"use_ema": True, "ema_overwrite_frequency": 3}),
    "accumulation": ({}, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_density_one_with_options(name):
    fields, options = OPTIONS[name]
    dense = alone(momentum_sgd(**options)) if options else _one_process()
    assert distance(dense, fitted(momentum_sgd(**options), everything(**fields))) <= SAME


@pytest.mark.slow
def test_it_is_a_keras_optimizer():
    """For Keras: class, config, isinstance, dense Lion, names of ours."""
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    plain = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, clipvalue=0.5)
    wrapped = DistributedOptimizer(plain, compression=Compression.dgc(0.05), op=hvd.Sum)
    assert (type(wrapped).__name__, type(wrapped).__module__) == ("SGD", "keras.src.optimizers.sgd")
    assert isinstance(wrapped, keras.optimizers.SGD) and wrapped.get_config() == plain.get_config()
    again = type(wrapped).from_config(wrapped.get_config())
    model = fit(smooth_model(), again, epochs=1)
    assert type(again).__name__ == "SGD" and session(again).settings.op == hvd.Sum
    assert again.get_config() == plain.get_config() and model.optimizer.compression_stats()["selected"] > 0
    for optimizer, compression in (
        (keras.optimizers.Lion(1e-3), Compression.topk(0.05)),
        (keras.optimizers.Adafactor(1e-3), Compression.none),
        (keras.optimizers.AdamW(3e-3, weight_decay=1e-2), Compression.dgc(0.05)),
    ):
        same_on_ranks(fingerprint(fitted(optimizer, compression)))
