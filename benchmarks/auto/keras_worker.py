"""One rank of `benchmarks.auto`, in Keras: each step is one call of a tf.function."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from benchmarks.auto.turns import AUTO, DENSITY, DGC, NOTHING, measure
from dgc_horovod.planning.trial import Trial
from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session

_CLASSES = 100


def resnet() -> tuple[Any, tuple[int, ...], int]:
    """Keras' ResNet-50 for images of 32 x 32 pixels, 23.8 M parameters; shape of an image, and how many are a batch."""
    shape = (32, 32, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=_CLASSES), shape, 8


def perceptron() -> tuple[Any, tuple[int, ...], int]:
    """Three layers, 0.4 M parameters."""
    layers = [keras.layers.Dense(width, activation="relu") for width in (400, 200)]
    return keras.Sequential([keras.layers.Input((784,)), *layers, keras.layers.Dense(_CLASSES)]), (784,), 64


MAKERS = {"Keras MLP, 0.4 M": perceptron, "Keras ResNet-50, 23.8 M": resnet}


class KerasTrainer:
    """A model that one method trains.

    Args:
        name: of `MAKERS`, what is trained.
        method: one of `METHODS`; "dense" is our optimizer without compression, as Horovod's own exchanges nothing under
            Keras 3.
    """

    def __init__(self, name: str, method: str) -> None:
        keras.utils.set_random_seed(0)
        model, shape, samples = MAKERS[name]()
        self.optimizer: Any = keras.optimizers.SGD(0.01, momentum=0.9)
        if method != NOTHING:
            compression = {
                AUTO: Compression.auto(density=DENSITY),
                DGC: Compression.dgc(density=DENSITY),
            }.get(method, Compression.none)
            self.optimizer = DistributedOptimizer(self.optimizer, compression=compression)
        self.optimizer.build(model.trainable_variables)
        generator = np.random.default_rng(hvd.rank())
        x = tf.constant(generator.standard_normal((samples, *shape)), tf.float32)
        y = tf.constant(generator.integers(_CLASSES, size=samples))
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=name != "Keras ResNet-50, 23.8 M")

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            self.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        self._step = tf.function(step, autograph=False)
        self._step()  # traced

    @property
    def trial(self) -> Trial:
        """That of auto."""
        found: Trial = session(self.optimizer).choice.trial
        return found

    def step(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self._step().numpy()
        return time.perf_counter() - begin


def main() -> None:
    """Measure the model of the command line, and write what this rank has found."""
    name, folder = sys.argv[1:]
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    found = measure(
        lambda method: KerasTrainer(name, method),
        lambda number: float(hvd.allreduce(tf.constant(number), name="mean", op=hvd.Average)),
    )
    Path(folder, f"rank{hvd.rank()}.json").write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
