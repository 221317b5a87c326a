"""Torch optimizers made, used and let go of, again and again in one process."""

from __future__ import annotations

import weakref
from typing import Any

import horovod.torch as hvd

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.growth import CYCLES, growth
from tests.helpers.training import momentum_sgd, smooth_model, train


def optimizers() -> dict[str, Any]:
    """Steps of each kind of exchange."""
    hvd.init()

    def cycle(compression: Any) -> list[weakref.ref[Any]]:
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression=compression)
        hvd.broadcast_optimizer_state(optimizer, 0)
        train(model, optimizer, 3)
        return [weakref.ref(optimizer), weakref.ref(session(optimizer).exchange), *map(weakref.ref, model.parameters())]

    dgc = Compression.dgc(0.05, min_numel=16)
    compressions = {"dgc": dgc, "auto": Compression.auto(), "local": Compression.local(2)}
    return {name: growth(lambda c=c: cycle(c), CYCLES) for name, c in compressions.items()}
