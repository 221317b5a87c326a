"""What the rules share: their context, the accepted range of a count, the cut to k by size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels


@dataclass(frozen=True)
class SelectionContext:
    """What a rule may need besides the values.

    Args:
        generator: makes the random source of this rank, span and step; called by rules that draw.
        threshold: magnitude of rule "threshold".
    """

    generator: Callable[[], np.random.Generator]
    threshold: float | None = None


def accepted_counts(k: int) -> tuple[int, int]:
    """Least and most candidates that a threshold may collect for k: [0.8 k, 1.25 k], below k = 10 k +- 1."""
    if k < 10:
        return max(1, k - 1), k + 1
    return math.ceil(0.8 * k), math.floor(1.25 * k)


def cut_to_k(kernels: Kernels, x: Array, positions: np.ndarray, k: int) -> np.ndarray:
    """The k largest of the candidates at `positions`: the overflow is chosen by size, never by position."""
    if positions.size <= k:
        return positions
    candidates = kernels.from_host(kernels.take(x, positions))
    return positions[kernels.top_k(candidates, k)]
