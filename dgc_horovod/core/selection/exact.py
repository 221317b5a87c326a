"""Exact top-k: the k largest magnitudes, ties to the lower position (TopK-SGD; DGC without sampling)."""

from __future__ import annotations

from dgc_horovod.core.selection.base import SelectionContext
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.kernels.contract import Elements


def select(view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """The k largest ``|x|`` exactly, at every call."""
    return view.largest(k)
