"""Fixed threshold: everything at or above one magnitude; `k` is only the packet's capacity."""

from __future__ import annotations

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.selection.base import SelectionContext, cut_to_k


def select(kernels: Kernels, x: Array, k: int, context: SelectionContext) -> np.ndarray:
    """The elements with ``|x| >= threshold``, the k largest of them if they are more. One read of x."""
    assert context.threshold is not None
    return cut_to_k(kernels, x, kernels.positions_at_least(x, context.threshold), k)
