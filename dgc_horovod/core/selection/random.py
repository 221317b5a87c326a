"""Random-k: k elements drawn uniformly, the baseline that shows what selecting by size is worth."""

from __future__ import annotations

import numpy as np

from dgc_horovod.core.selection.base import SelectionContext
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.kernels.contract import Elements


def select(view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """k of the non-zero elements, each equally likely; every rank and step draws anew.

    Twice k positions are drawn first; only if too few of them hold anything are all non-zero elements listed.
    Cost: about 2 k looks, else one read.
    """
    generator = context.generator()
    if 4 * k < view.numel:
        drawn = view.at(np.sort(generator.choice(view.numel, 2 * k, replace=False, shuffle=False)))
        live = np.flatnonzero(drawn.values)
        if live.size >= k:
            return _drawn(drawn, live, k, generator)
    every = view.at_least(0.0, view.numel)
    return _drawn(every, np.arange(every.values.size), k, generator)


def _drawn(elements: Elements, of: np.ndarray, k: int, generator: np.random.Generator) -> Elements:
    if of.size > k:
        of = np.sort(generator.choice(of, k, replace=False, shuffle=False))
    return Elements(elements.positions[of], elements.values[of])
