"""Selection rules, which choose the k elements of a residual to send. One function a rule, one signature.

Every rule returns non-zero elements, ascending, at most k, and at least `Rule.min_fraction` of k, or all there are.
Elements that are not selected stay in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from dgc_horovod.core.candidates import ResidualView
from dgc_horovod.kernels.contract import Elements

_SAMPLED_FRACTION = 0.01
_LEAST_HITS = 64  # least number of sampled elements that reach the threshold, whose relative error is 1/sqrt of it
_LOWER = 0.8
_TRIES = 10
_LARGEST = float(np.finfo(np.float32).max)
_NORMAL = NormalDist()

Generator = Callable[[], np.random.Generator]  # makes the random source of this rank, bucket and step


def accepted_counts(k: int) -> tuple[int, int]:
    """Return the accepted range of counts for k: [0.8 k, 1.25 k], below k = 10 k +- 1."""
    if k < 10:
        return max(1, k - 1), k + 1
    return math.ceil(0.8 * k), math.floor(1.25 * k)


def exact(view: ResidualView, k: int, generator: Generator) -> Elements:
    """The k largest ``|x|``, ties to the lower position (TopK-SGD; DGC without sampling)."""
    return view.largest(k)


def sampled(view: ResidualView, k: int, generator: Generator) -> Elements:
    """At most k of the largest ``|x|``, at least 0.8 k: threshold of a 1% sample (DGC, arXiv 1712.01887, section 5).

    The sample is strided from a random start. Too few hits lower the threshold by 0.8, up to ten times,
    then exact top-k decides; too many are cut to k by size (the published code cuts by position).
    """
    numel = view.numel
    stride = numel // max(math.ceil(_SAMPLED_FRACTION * numel), math.ceil(_LEAST_HITS * numel / k))
    if stride <= 1:
        return view.largest(k)
    start = int(generator().integers(stride))
    size = -(-(numel - start) // stride)
    threshold = view.kth_of_sample(start, stride, min(size, max(1, round(k * size / numel))))
    least, _ = accepted_counts(k)
    for _ in range(_TRIES):
        if threshold == 0 or view.count_at_least(threshold) >= least:
            return view.at_least(threshold, k)
        threshold = float(np.float32(_LOWER * threshold))
    return view.largest(k)


def two_sided_point(density: float) -> float:
    """z with ``P(|X| >= z) = density`` for a standard normal X; density in (0, 1]."""
    return _NORMAL.inv_cdf(1 - density / 2)


def gaussian(view: ResidualView, k: int, generator: Generator) -> Elements:
    """GaussianK-SGD (Shi et al., arXiv 1911.08772): threshold from mean and deviation, no sort.

    The published adjustment (three tries, times 0.5 or 1.5) ends anywhere between nothing and 70 k, because error
    feedback thins the tail until the Gaussian threshold lies above the maximum. Here the Gaussian is the first guess
    of a bracketed search on log(count), and exact top-k the last resort. At least 0.8 k elements.

    The threshold is ``|mean| + deviation * z`` with z the two-sided point of k/d, then searched for. About five
    counts, most of them among the candidates.
    """
    mean, deviation = view.mean_and_deviation()
    threshold = search_threshold(view, k, abs(mean) + deviation * two_sided_point(k / view.numel))
    if threshold is None:
        return view.largest(k)
    return view.at_least(threshold, k)


def search_threshold(view: ResidualView, k: int, guess: float) -> float | None:
    """Find a threshold that an accepted count of elements reaches; None after ten counts, or beyond float32.

    Between a threshold that too many reach and one that too few reach, the next is found by interpolation
    on log(count), every third time by halving; while nothing bounds it from above, by fitting a
    Gaussian to the last count. The threshold of the candidates, whose count is known, is the first lower bound.
    """

    def beyond(threshold: float, count: int) -> float:
        points = two_sided_point(k / view.numel), two_sided_point(min(1.0, count / view.numel))
        return threshold * 1.01 * points[0] / max(points[1], 0.1)

    if not guess > 0:  # mean and deviation are 0 or not finite: no first threshold
        return None
    least, most = accepted_counts(k)
    low, count = view.known_low(k)
    log_low = math.log(count)
    high, log_high = math.inf, 0.0
    threshold = guess if guess > low else beyond(low, count)
    for attempt in range(_TRIES):
        if threshold > _LARGEST:  # no element can reach it
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


_SELECT: dict[str, Callable[[ResidualView, int, Generator], Elements]] = {
    "exact": exact,
    "sampled": sampled,
    "gaussian": gaussian,
}


def select(rule: str, view: ResidualView, k: int, generator: Generator) -> Elements:
    """Select elements of a bucket by `rule`; with ``k >= numel`` every rule selects all."""
    if k >= view.numel:
        return view.at_least(0.0, view.numel)
    return _SELECT[rule](view, k, generator)
