"""What the rules share: their context, and the accepted range of a count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SelectionContext:
    """What a rule may need besides the values.

    Args:
        generator: function that makes the random source of this rank, range and step; called by rules that draw.
        threshold: smallest magnitude that rule "threshold" selects, > 0; None for other rules.
    """

    generator: Callable[[], np.random.Generator]
    threshold: float | None = None


def accepted_counts(k: int) -> tuple[int, int]:
    """Least and most elements that a threshold may leave for k: [0.8 k, 1.25 k], below k = 10 k +- 1."""
    if k < 10:
        return max(1, k - 1), k + 1
    return math.ceil(0.8 * k), math.floor(1.25 * k)
