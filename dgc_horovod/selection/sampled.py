"""Sampled top-k: threshold from a 1% sample, as in the published DGC (section 3, "hierarchical selection")."""

from __future__ import annotations

import math

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.selection.base import SelectionContext, accepted_counts, cut_to_k

_FRACTION = 0.01
_LEAST_HITS = 64  # sampled elements that should reach the threshold: its relative error is 1/sqrt of it
_TRIES = 10
_LOWER = 0.8


def select(kernels: Kernels, x: Array, k: int, context: SelectionContext) -> np.ndarray:
    """At most k of the largest ``|x|``, and at least 0.8 k of them.

    The sample is strided from a random start. Too few hits lower the threshold by 0.8, up to ten times,
    then exact top-k decides; too many are cut to k by size (the published code cuts by position).
    Cost: one read of x for each threshold tried, usually one or two.
    """
    numel = len(x)
    stride = numel // max(math.ceil(_FRACTION * numel), math.ceil(_LEAST_HITS * numel / k))
    if stride <= 1:
        return kernels.top_k(x, k)
    sample = kernels.sample(x, int(context.generator().integers(stride)), stride)
    rank = min(sample.size, max(1, round(k * sample.size / numel)))
    threshold = float(np.partition(sample, sample.size - rank)[sample.size - rank])
    least, _ = accepted_counts(k)
    for _ in range(_TRIES):
        positions = kernels.positions_at_least(x, threshold)
        if positions.size >= least or threshold == 0:
            return cut_to_k(kernels, x, positions, k)
        threshold = float(np.float32(_LOWER * threshold))
    return kernels.top_k(x, k)
