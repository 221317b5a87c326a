"""Selection rules: which k elements of a residual are sent. One file per rule, one signature.

Every rule returns ascending, unique positions of non-zero elements, never more than k; what is not
selected stays in the residual. With fewer than k non-zeros all of them are selected.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.selection import exact, fixed, gaussian, random, sampled
from dgc_horovod.selection.base import SelectionContext

Rule = Callable[[Kernels, Array, int, SelectionContext], np.ndarray]

RULES: dict[str, Rule] = {
    "exact": exact.select,
    "sampled": sampled.select,
    "gaussian": gaussian.select,
    "random": random.select,
    "threshold": fixed.select,
}

__all__ = ["RULES", "Rule", "SelectionContext", "select"]


def select(rule: str, kernels: Kernels, x: Array, k: int, context: SelectionContext) -> np.ndarray:
    """Positions that `rule` sends of `x`; with ``k >= len(x)`` every rule with a density sends everything."""
    if k >= len(x) and rule != "threshold":
        return kernels.positions_at_least(x, 0.0)
    return RULES[rule](kernels, x, k, context)
