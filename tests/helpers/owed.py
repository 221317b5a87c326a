"""What ranks owe the weights, whoever of them keeps it."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from dgc_horovod.testing.torch import session


def owed(optimizer: Any) -> list[float]:
    """The mean over ranks of v, and of u, each with weights that tell its elements apart."""
    found = []
    for part in ("v", "u"):
        own = 0.0
        for engine in session(optimizer).exchange.engines:
            kept = engine.as_one_of_all(part).astype("float64")
            own += float((kept * np.sin(np.arange(kept.size) + 1)).sum())
        found.append(float(hvd.allreduce(torch.tensor(own, dtype=torch.float64), name=f"owed.{part}")))
    return found
