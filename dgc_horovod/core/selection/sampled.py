"""Sampled top-k: threshold from a 1% sample, as in DGC (arXiv 1712.01887, section 5)."""

from __future__ import annotations

import math

import numpy as np

from dgc_horovod.core.selection.base import SelectionContext, accepted_counts
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.kernels.contract import Elements

_FRACTION = 0.01
_LEAST_HITS = 64  # sampled elements that should reach the threshold: its relative error is 1/sqrt of it
_TRIES = 10
_LOWER = 0.8


def select(view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """At most k of the largest ``|x|``, and at least 0.8 k of them.

    The sample is strided from a random start. Too few hits lower the threshold by 0.8, up to ten times,
    then exact top-k decides; too many are cut to k by size (the published code cuts by position).
    """
    numel = view.numel
    stride = numel // max(math.ceil(_FRACTION * numel), math.ceil(_LEAST_HITS * numel / k))
    if stride <= 1:
        return view.largest(k)
    start = int(context.generator().integers(stride))
    size = -(-(numel - start) // stride)
    threshold = view.kth_of_sample(start, stride, min(size, max(1, round(k * size / numel))))
    least, _ = accepted_counts(k)
    for _ in range(_TRIES):
        if threshold == 0 or view.count_at_least(threshold) >= least:
            return view.at_least(threshold, k)
        threshold = float(np.float32(_LOWER * threshold))
    return view.largest(k)
