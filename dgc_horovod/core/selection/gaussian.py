"""GaussianK-SGD (Shi et al., arXiv 1911.08772): threshold from mean and deviation, no sort.

The published adjustment (three tries, times 0.5 or 1.5) ends anywhere between nothing and 70 k, because
error feedback thins the tail until the Gaussian threshold lies above the maximum. Here the Gaussian is
the first guess of a bracketed search on log(count), and exact top-k the last resort.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from dgc_horovod.core.selection.base import SelectionContext, accepted_counts
from dgc_horovod.core.selection.residual_view import ResidualView
from dgc_horovod.kernels.contract import Elements

_TRIES = 10
_LARGEST = float(np.finfo(np.float32).max)
_NORMAL = NormalDist()


def two_sided_point(density: float) -> float:
    """z with ``P(|X| >= z) = density`` for a standard normal X; density in (0, 1]."""
    return _NORMAL.inv_cdf(1 - density / 2)


def select(view: ResidualView, k: int, context: SelectionContext) -> Elements:
    """At most k of the largest ``|x|``, and at least 0.8 k of them.

    The threshold is ``|mean| + deviation * z`` with z the two-sided point of k/d, then searched for. About five
    counts, most of them among the candidates.
    """
    mean, deviation = view.mean_and_deviation()
    threshold = search_threshold(view, k, abs(mean) + deviation * two_sided_point(k / view.numel))
    if threshold is None:
        return view.largest(k)
    return view.at_least(threshold, k)


def search_threshold(view: ResidualView, k: int, guess: float) -> float | None:
    """A threshold that an accepted count of elements reaches, or None after ten counts, or beyond float32.

    Between a threshold that too many reach and one that too few reach, the next is found by interpolation
    on log(count), every third time by halving; while nothing bounds it from above, by fitting a
    Gaussian to the last count. The threshold of the candidates, whose count is known, is the first lower bound.
    """

    def beyond(threshold: float, count: int) -> float:
        points = two_sided_point(k / view.numel), two_sided_point(min(1.0, count / view.numel))
        return threshold * 1.01 * points[0] / max(points[1], 0.1)

    if not guess > 0:  # nothing was seen that could be followed
        return None
    least, most = accepted_counts(k)
    low, count = view.known_low(k)
    log_low = math.log(count)
    high, log_high = math.inf, 0.0
    threshold = guess if guess > low else beyond(low, count)
    for attempt in range(_TRIES):
        if threshold > _LARGEST:  # no element reaches it, and no count says how far below it the k-th is
            return None
        threshold = float(np.float32(threshold))
        count = view.count_at_least(threshold)
        if least <= count <= most:
            return threshold
        if count > k:
            low, log_low = threshold, math.log(count)
        else:
            high, log_high = threshold, math.log(max(count, 0.5))
        if high == math.inf:
            threshold = beyond(threshold, count)
        else:
            part = (log_low - math.log(k)) / max(log_low - log_high, 1e-9)
            part = 0.5 if attempt % 3 == 2 else min(max(part, 0.1), 0.9)
            threshold = low + part * (high - low)
    return None
