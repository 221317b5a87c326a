"""Selection rules: which k elements of a residual are sent. One file per rule, one signature.

Every rule returns non-zero elements, ascending, at most k, and at least `Rule.min_fraction` of k, or all there are.
What is not selected stays in the residual.
"""

from __future__ import annotations

from dgc_horovod.core.selection.base import SelectionContext
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.core.selection.threshold_predictor import ThresholdPredictor
from dgc_horovod.kernels.contract import Elements
from dgc_horovod.rules import RULES

__all__ = ["ResidualView", "SelectionContext", "ThresholdPredictor", "select"]


def select(rule: str, view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """What `rule` sends of a range; with ``k >= numel`` every rule with a density sends everything."""
    if k >= view.numel and RULES[rule].sets_density:
        return view.at_least(0.0, view.numel)
    found: Elements = RULES[rule].select(view, k, context)
    return found
