"""Fixed threshold: everything at or above one magnitude; `k` is only the packet's capacity."""

from __future__ import annotations

from dgc_horovod.core.selection.base import SelectionContext
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.kernels.contract import Elements


def select(view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """The elements with ``|x| >= threshold``, the k largest of them if they are more."""
    assert context.threshold is not None
    return view.at_least(context.threshold, k)
