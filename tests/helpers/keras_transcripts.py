"""Runs of Keras whose every bit is compared with what it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers import ways as tables
from tests.helpers.keras_training import alone, fit, momentum_sgd, smooth_model, weights
from tests.helpers.transcripts import Transcript, hash_of, made, runs

_OTHERS: dict[str, Callable[[], Any]] = {
    "nesterov, decay": lambda: momentum_sgd(nesterov=True, weight_decay=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(3e-3),
}


def all_runs() -> dict[str, dict[str, str]]:
    """Each run's hashes on this rank; "stock" tells whether this machine computes as the one that has recorded them."""
    found = {"stock": Transcript().hashes(weights(alone(momentum_sgd())), {"tensors": {}})}
    for name, run in runs(hvd.size()).items():
        found[name] = _hashes(momentum_sgd(), made(Compression, run))
    for name, make in _OTHERS.items():
        for compression in ("dgc, warm-up", "topk"):
            found[f"{name}, {compression}"] = _hashes(make(), made(Compression, runs(hvd.size())[compression]))
    return found


def _hashes(optimizer: Any, compression: Any) -> dict[str, str]:
    wrapped = DistributedOptimizer(optimizer, compression=compression)
    with Transcript() as transcript:
        model = fit(smooth_model(), wrapped)
    return transcript.hashes(weights(model), wrapped.residual_state_dict())


_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": momentum_sgd,
    "Nesterov": lambda **more: momentum_sgd(nesterov=True, weight_decay=1e-3, **more),
    "AdamW": lambda **more: keras.optimizers.AdamW(3e-3, **more),
    "RMSprop": lambda **more: keras.optimizers.RMSprop(1e-3, **more),
}


class _Training:
    def __init__(self, way: tables.Way, optimizer: Any, seed: int = 0) -> None:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dense(way.width, activation="tanh"), keras.layers.Dense(1)]
        self.model = keras.Sequential([keras.layers.Input((tables.INPUTS,)), *layers])
        self._way, self.rank, self.optimizer = way, hvd.rank(), optimizer
        optimizer.build(self.model.trainable_variables)
        self._step = tf.function(self._traced)

    def _traced(self, x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x) - y) ** 2)
        known = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, known), known)

    def step(self, number: int) -> None:
        """See `ways.Training`."""
        for i in range(self._way.passes):
            self._step(*map(tf.constant, self._way.batch(self.rank, number * self._way.passes + i)))

    def save(self, place: Path) -> None:
        """See `ways.Training`."""
        save_checkpoint(place, self.model, self.optimizer)

    def load(self, place: Path) -> None:
        """See `ways.Training`."""
        load_checkpoint(place, self.model, self.optimizer)

    def weights(self) -> np.ndarray:
        """See `ways.Training`."""
        return weights(self.model)

    def state(self) -> Iterator[Any]:
        """See `ways.Training`."""
        store: dict[str, Any] = {}
        self.optimizer.save_own_variables(store)
        for _, value in sorted(store.items()):
            yield value


def _made(way: tables.Way, seed: int) -> _Training:
    own = _OPTIMIZERS[way.optimizer](**({"global_clipnorm": tables.LIMIT} if way.clip else {}))
    compression = way.compression(Compression)
    return _Training(way, DistributedOptimizer(own, compression=compression, backward_passes_per_step=way.passes), seed)


@functools.cache
def _plain() -> dict[str, Any]:
    way, found = tables.Way(), []
    for make in _OPTIMIZERS.values():
        training = _Training(way, make())
        for number in range(way.steps):
            training.step(number)
        found.append(("", training.weights()))
    return {"stock": {"weights": hash_of(found)}}


def ways() -> dict[str, Any]:
    """What scripts do."""
    return {**_plain(), **tables.follow_all(tables.KERAS, _made, "quick")}


def more_ways() -> dict[str, Any]:
    """The others."""
    return {**_plain(), **tables.follow_all(tables.KERAS, _made, "other")}


def on_nodes() -> dict[str, Any]:
    """Some of it on nodes."""
    return {**_plain(), **tables.follow_all(tables.KERAS, _made, "nodes")}


def fixtures() -> dict[str, Any]:
    """Checkpoints of another day."""
    return {**_plain(), **tables.read_fixtures(tables.KERAS, _made, hvd.size())}


def write() -> dict[str, Any]:
    """Write them."""
    return tables.write_fixtures(tables.KERAS, _made)
