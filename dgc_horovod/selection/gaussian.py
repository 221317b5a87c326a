"""GaussianK-SGD (Shi et al., arXiv 1911.08772): threshold from mean and deviation, no sort.

The published adjustment (three tries, times 0.5 or 1.5) ends anywhere between nothing and 70 k, because
error feedback thins the tail until the Gaussian threshold lies above the maximum. Here the Gaussian is
the first guess of a bracketed search on log(count), and exact top-k the last resort.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.selection.base import SelectionContext, accepted_counts, cut_to_k

_TRIES = 10
_NORMAL = NormalDist()


def two_sided_point(density: float) -> float:
    """z with ``P(|X| >= z) = density`` for a standard normal X; density in (0, 1]."""
    return _NORMAL.inv_cdf(1 - density / 2)


def select(kernels: Kernels, x: Array, k: int, context: SelectionContext) -> np.ndarray:
    """At most k of the largest ``|x|``, and at least 0.8 k of them.

    Cost: one read of x for the moments, one for each count (about 5), one for the positions.
    """
    total, squares = kernels.sums(x)
    if squares == 0:
        return np.empty(0, np.int64)
    mean = total / len(x)
    deviation = math.sqrt(max(squares / len(x) - mean * mean, 0.0))
    guess = abs(mean) + deviation * two_sided_point(k / len(x))
    threshold = search_threshold(kernels, x, k, guess)
    if threshold is None:
        return kernels.top_k(x, k)
    return cut_to_k(kernels, x, kernels.positions_at_least(x, threshold), k)


def search_threshold(kernels: Kernels, x: Array, k: int, guess: float) -> float | None:
    """A threshold that an accepted count of elements reaches, or None after ten counts.

    Between a threshold that too many reach and one that too few reach, the next is found by interpolation
    on log(count), every third time by halving; while nothing bounds it from above, by fitting a
    Gaussian to the last count.
    """
    least, most = accepted_counts(k)
    low, log_low = 0.0, math.log(len(x))
    high, log_high = math.inf, 0.0
    threshold = float(np.float32(guess))
    for attempt in range(_TRIES):
        count = kernels.count_at_least(x, threshold)
        if least <= count <= most:
            return threshold
        if count > k:
            low, log_low = threshold, math.log(count)
        else:
            high, log_high = threshold, math.log(max(count, 0.5))
        if high == math.inf:
            threshold *= 1.01 * two_sided_point(k / len(x)) / max(two_sided_point(min(1.0, count / len(x))), 0.1)
        else:
            part = (log_low - math.log(k)) / max(log_low - log_high, 1e-9)
            part = 0.5 if attempt % 3 == 2 else min(max(part, 0.1), 0.9)
            threshold = low + part * (high - low)
        threshold = float(np.float32(threshold))
    return None
