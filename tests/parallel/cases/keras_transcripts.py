"""Runs of Keras whose every bit is compared with what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from tests.helpers.keras_training import alone, fit, momentum_sgd, smooth_model, weights
from tests.helpers.transcripts import Transcript, made, runs

_OTHERS: dict[str, Callable[[], Any]] = {
    "nesterov, decay": lambda: momentum_sgd(nesterov=True, weight_decay=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(3e-3),
}


def all_runs() -> dict[str, dict[str, str]]:
    """Each run's hashes on this rank; "stock" tells whether this machine computes as the one that has recorded them."""
    hvd.init()
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
