"""Elements have owners, under Keras."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer
from dgc_horovod.testing.tensorflow import session
from tests.helpers.keras_training import fingerprint, fit, momentum_sgd, smooth_model, weights


def long_run() -> dict[str, Any]:
    """A run, then a flush."""
    hvd.init()
    optimizer = DistributedOptimizer(
        momentum_sgd(), compression=Compression.dgc(density=0.05, min_numel=16, exchange="sharded")
    )
    model = fit(smooth_model(), optimizer, 30)
    engines = session(optimizer).buckets.engines
    (sparse,) = [engine for engine in engines if not engine.bucket.uncompressed]
    before, remainder = weights(model), float(np.abs(sparse.state.remainder).sum())
    optimizer.flush()
    return {
        "fingerprint": fingerprint(model),
        "rounds": [collective.name for collective in sparse.exchange.rounds],
        "remainder": remainder,
        "moved": float(np.abs(weights(model) - before).max()),
        "left": float(np.abs(sparse.state.full_vector("v")).max()),
    }
