"""What a TensorFlow script is told: ranks that disagree or stay away, and what would train wrongly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as stock
import numpy as np
import tensorflow as tf
from horovod.tensorflow import join as stock_join

from dgc_horovod import DGCConfig
from dgc_horovod.compression import ConfiguredCompressor
from dgc_horovod.tensorflow import DistributedGradientTape
from dgc_horovod.tensorflow import DistributedOptimizer as TensorFlowOptimizer
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fingerprint, fit, fitted, keras, momentum_sgd, shard, smooth_model
from tests.helpers.logs import messages


class _Torchs(ConfiguredCompressor):
    framework = "torch"


def process_sets() -> dict[str, Any]:
    """A set that holds rank 0 only: rank 1 trains by itself and has counts of zero."""
    only = hvd.ProcessSet([0])
    hvd.init(process_sets=[only])
    model = fitted(momentum_sgd(), Compression.dgc(0.05), epochs=1, process_set=only)
    hvd.allreduce(tf.zeros(1), name="all_done")  # a rank that leaves early takes the process sets with it
    return model.optimizer.compression_stats()


def refused() -> dict[str, str]:
    """Arguments and combinations, each with its message."""
    hvd.init()
    sgd, dgc = momentum_sgd(), Compression.dgc(0.05)
    wrapped = DistributedOptimizer(momentum_sgd(), compression=dgc)
    scaled = keras.optimizers.LossScaleOptimizer(DistributedOptimizer(momentum_sgd(), compression=dgc))
    variable = keras.Variable(tf.ones((40, 50)))
    ones = tf.ones((40, 50))

    @tf.function(jit_compile=True)
    def in_xla(gradient: Any) -> None:
        wrapped.apply([gradient], [variable])

    return {
        "twice": error_of(lambda: DistributedOptimizer(wrapped, compression=dgc)),
        "not called": error_of(lambda: DistributedOptimizer(sgd, compression=Compression.dgc)),
        "adasum": error_of(lambda: DistributedOptimizer(sgd, op=hvd.Adasum)),
        "predivide": error_of(lambda: DistributedOptimizer(sgd, op=hvd.Sum, gradient_predivide_factor=2.0)),
        "passes": error_of(lambda: DistributedOptimizer(sgd, backward_passes_per_step=0)),
        "passes twice": error_of(
            lambda: DistributedOptimizer(momentum_sgd(gradient_accumulation_steps=2), backward_passes_per_step=2)
        ),
        "amsgrad": error_of(lambda: DistributedOptimizer(keras.optimizers.Adam(amsgrad=True), compression=dgc)),
        "xla": error_of(lambda: in_xla(ones)),
        "scaler outside": error_of(lambda: scaled.apply([ones], [variable])),
        "positional": error_of(lambda: TensorFlowOptimizer(momentum_sgd(), dgc)),
        "torch's": error_of(lambda: DistributedOptimizer(sgd, compression=_Torchs(DGCConfig()))),
        "horovod's": error_of(lambda: DistributedOptimizer(stock.DistributedOptimizer(momentum_sgd()))),
        "tape twice": error_of(lambda: DistributedGradientTape(DistributedGradientTape(tf.GradientTape()))),
        "string": error_of(lambda: DistributedOptimizer("sgd")),
    }


def disagreement() -> dict[str, str]:
    """Ranks with another density, choice, model, number of variables; every rank must hear the same."""
    hvd.init()
    first = hvd.rank() == 0

    def train(compression: Any, model: Any = None) -> str:
        optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
        return error_of(lambda: fit(model or smooth_model(), optimizer, 1))

    wide = keras.Sequential([keras.layers.Input((32,)), keras.layers.Dense(1)])
    tape_on = DistributedGradientTape(_taped(), compression=Compression.topk(0.05 if first else 0.1))
    return {
        "density": train(Compression.dgc(0.05 if first else 0.1)),
        "choice": train(Compression.dgc(0.05) if first else Compression.none),
        "fp16": train(Compression.fp16 if first else Compression.none),
        "model": train(Compression.none, smooth_model() if first else wide),
        "optimizer": error_of(
            lambda: fitted(keras.optimizers.Adagrad() if first else keras.optimizers.RMSprop(), Compression.topk(0.05))
        ),
        "tape": error_of(lambda: tape_on.gradient(*tape_on.asked)),
        "metrics": _unwritable(lambda: train(Compression.dgc(0.05))),
        "afterwards": fingerprint(fitted(momentum_sgd(), Compression.dgc(0.05), epochs=1)),
    }


def _unwritable(train: Callable[[], str]) -> str:
    """What is told where rank 0 cannot write the metrics file."""
    os.environ["DGC_METRICS_FILE"] = f"{os.devnull}/metrics.jsonl"
    try:
        return train()
    finally:
        del os.environ["DGC_METRICS_FILE"]


def _taped() -> Any:
    variable = tf.Variable(tf.ones((40, 50)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    tape.asked = (loss, [variable])
    return tape


def other_epochs() -> dict[str, str]:
    """Ranks in different epochs of a warm-up: the packets differ in length or step, and every rank hears it."""
    hvd.init()
    found = {}
    for mode in ("eager", "graph"):
        variable = keras.Variable(tf.ones((40, 50)))
        warmup = WarmupSchedule(epochs=4, first_density=0.04)
        optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.001, warmup=warmup, min_numel=1))
        optimizer.set_epoch(2 * hvd.rank())
        found[mode] = _applied(optimizer, variable, mode)
    return found


def _applied(optimizer: Any, variable: Any, mode: str) -> str:
    def apply(gradient: Any) -> None:
        optimizer.apply([gradient], [variable])

    run = tf.function(apply) if mode == "graph" else apply
    return error_of(lambda: run(tf.constant(np.random.default_rng(0).standard_normal((40, 50)), tf.float32)))


def spoilt_weights() -> dict[str, Any]:
    """What is said of weights that are not finite: an optimizer has made them, or a script; and of Keras' Adafactor."""
    hvd.init()
    dgc, found = Compression.dgc(0.05), {}
    cases = {
        "made": (_MyAdafactor(0.01), dgc),
        "had": (momentum_sgd(), Compression.dgc(0.05, on_nonfinite="stop")),
        "told": (momentum_sgd(), dgc),
        "local": (momentum_sgd(), Compression.local(2)),
        "refused": (keras.optimizers.Adafactor(0.01), Compression.topk(0.05)),
        "sent whole": (keras.optimizers.Adafactor(0.01), Compression.dgc(1.0)),
        "steps alone": (keras.optimizers.Adafactor(0.01), Compression.local(2)),
        "chosen": (keras.optimizers.Adafactor(0.01), Compression.auto()),
    }
    for name, (optimizer, compression) in cases.items():
        model = smooth_model()
        if name in ("had", "told", "local"):
            model.layers[1].kernel.assign(model.layers[1].kernel * np.nan)
        with messages() as said:
            error = error_of(lambda given=(model, optimizer, compression): _stepped(*given))
        found[name] = error or "; ".join(text for text in said if "weights" in text or "stays" in text)
    variable = tf.Variable(tf.fill((40, 50), np.nan))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable**2)
    with messages() as said:
        DistributedGradientTape(tape, compression=Compression.topk(0.05)).gradient(loss, [variable])
    return {**found, "tape": "; ".join(text for text in said if "weights" in text)}


class _MyAdafactor(keras.optimizers.Adafactor):
    """One of whose arithmetic nothing is known."""

    def update_step(self, *arguments: Any) -> None:
        super().update_step(*arguments)


def _stepped(model: Any, plain: Any, compression: Any) -> None:
    x, y = shard(hvd.rank())
    optimizer = DistributedOptimizer(plain, compression=compression)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def missing_rank() -> dict[str, Any]:
    """Rank 1 stays away from a step: rank 0 is told after DGC_TIMEOUT, and rank 1 at its next."""
    hvd.init()
    variable = keras.Variable(tf.ones((40, 50)))
    optimizer = DistributedOptimizer(momentum_sgd(), compression=Compression.dgc(0.05))
    ones = tf.ones((40, 50))
    optimizer.apply([ones], [variable])
    start = time.monotonic()
    if hvd.rank() == 1:
        time.sleep(8)
    said = error_of(lambda: optimizer.apply([ones], [variable]))
    return {"said": said, "seconds": time.monotonic() - start}


def join() -> dict[str, Any]:
    """Horovod's join after as many steps on each rank, with and without compression; then after one more on rank 1."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, compression in {"none": Compression.none, "dgc": Compression.dgc(0.05)}.items():
        variable = keras.Variable(tf.ones((40, 50)))
        optimizer = DistributedOptimizer(momentum_sgd(), compression=compression)
        # uneven data are Horovod's own where nothing is compressed, and no compressed optimizer has been used
        for _ in range(2 if name == "dgc" else 2 + hvd.rank()):
            optimizer.apply([tf.ones((40, 50))], [variable])
        found[f"last, {name}"] = int(hvd.join())
    start = time.monotonic()
    if hvd.rank() == 1:
        found["said"] = error_of(lambda: optimizer.apply([tf.ones((40, 50))], [variable]))
    else:
        found["said"] = error_of(stock_join)
    return {**found, "seconds": time.monotonic() - start}
