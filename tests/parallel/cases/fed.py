"""The torch half of test_keras_fed.py: the engine's numbers on fed gradients."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.fed import DENSITY, MIN_NUMEL, RATE, SETTINGS, SHAPES, gradients, looked_at


def with_torch() -> dict[str, Any]:
    """Setting -> what `looked_at` says after each step."""
    hvd.init()
    found = {}
    for name, (fields, options) in SETTINGS.items():
        parameters = {key: torch.nn.Parameter(torch.zeros(shape)) for key, shape in SHAPES.items()}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(parameters.values(), lr=RATE, **options),
            parameters.items(),
            Compression.dgc(**{"density": DENSITY, "min_numel": MIN_NUMEL, **fields}),
        )
        rows = []
        for step in gradients(hvd.rank()):
            optimizer.zero_grad()
            for key, p in parameters.items():
                p.backward(torch.from_numpy(step[key]))
            optimizer.step()
            rows.append(looked_at(session(optimizer).exchange))
        found[name] = rows
    return found
