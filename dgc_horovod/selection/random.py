"""Random-k: k elements drawn uniformly, the baseline that shows what selecting by size is worth."""

from __future__ import annotations

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.selection.base import SelectionContext


def select(kernels: Kernels, x: Array, k: int, context: SelectionContext) -> np.ndarray:
    """k of the non-zero elements, each equally likely; every rank and step draws anew. One read of x."""
    positions = kernels.positions_at_least(x, 0.0)
    if positions.size <= k:
        return positions
    return np.sort(context.generator().choice(positions, k, replace=False, shuffle=False))
