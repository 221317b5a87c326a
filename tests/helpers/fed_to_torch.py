"""The numbers of the torch adapter's engine on fed gradients, with which the TensorFlow adapter's are compared."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.fed import DENSITY, MIN_NUMEL, RATE, SETTINGS, SHAPES, gradients, looked_at


def with_torch() -> dict[str, list[dict[str, str]]]:
    """On a rank: setting -> what `looked_at` says after each step."""
    found = {}
    for name, (fields, options) in SETTINGS.items():
        parameters = {key: torch.nn.Parameter(torch.zeros(shape)) for key, shape in SHAPES.items()}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(parameters.values(), lr=RATE, **options),
            parameters.items(),
            Compression.dgc(**{"density": DENSITY, "min_numel": MIN_NUMEL, **fields}),
        )
        rows = found[name] = []
        for step in gradients(hvd.rank()):
            optimizer.zero_grad()
            for key, p in parameters.items():
                p.backward(torch.from_numpy(step[key]))
            optimizer.step()
            rows.append(looked_at(session(optimizer).exchange))
    return found
