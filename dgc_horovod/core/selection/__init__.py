"""Selection rules: which k elements of a residual are sent. One file per rule, one signature.

Every rule returns non-zero elements, ascending, never more than k; what is not selected stays in the residual. With
fewer than k non-zeros all of them are selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dgc_horovod.core.selection import exact, fixed, gaussian, random, sampled
from dgc_horovod.core.selection.base import SelectionContext
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.core.selection.threshold_predictor import ThresholdPredictor
from dgc_horovod.kernels.contract import Elements


@dataclass(frozen=True)
class Rule:
    """One rule, and what it would like the pass over the bucket to note for it.

    Args:
        select: view, k, context -> elements.
        by_size: whether it sends the largest, so that candidates help it.
        needs_sums: whether it looks at mean and deviation.
        on_device: whether the kernels of a device can make the whole selection.
        sends_k: whether it sends all there is where k is all; not where something else than k decides.
    """

    select: Callable[[ResidualView, int, SelectionContext], Elements]
    by_size: bool = True
    needs_sums: bool = False
    on_device: bool = False
    sends_k: bool = True


RULES: dict[str, Rule] = {
    "exact": Rule(exact.select, on_device=True),
    "sampled": Rule(sampled.select),
    "gaussian": Rule(gaussian.select, needs_sums=True),
    "random": Rule(random.select, by_size=False),
    "threshold": Rule(fixed.select, sends_k=False),
}

__all__ = ["RULES", "ResidualView", "Rule", "SelectionContext", "ThresholdPredictor", "select"]


def select(rule: str, view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """What `rule` sends of a span; with ``k >= numel`` every rule with a density sends everything."""
    if k >= view.numel and RULES[rule].sends_k:
        return view.at_least(0.0, view.numel)
    return RULES[rule].select(view, k, context)
