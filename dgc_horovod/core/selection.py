"""Selection of the elements to send: rules, their view of the residual, and the prediction of the threshold.

A rule is one function; all have one signature. Every rule returns non-zero elements, ascending, at most k, and at least
`Rule.min_fraction` of k, or all there are. Elements that are not selected stay in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from dgc_horovod.kernels.contract import NO_ELEMENTS, Array, Elements, Kernels
from dgc_horovod.kernels.reference import summed_numel

_WORTHWHILE = 1 / 8  # share of a bucket: if more is sent, candidates save nothing
_AIM, _MOST_AIM = 1.35, 3.0  # candidates per selected element
_TINY = float(np.finfo(np.float32).tiny)
_MOST_GROWTH = 1.1
_FIRST_STEEPNESS, _LEAST_STEEPNESS, _MOST_STEEPNESS = 8.0, 1.0, 60.0


class ThresholdPredictor:
    """Predicts a magnitude that somewhat more than k elements reach at the next step.

    The smallest sent magnitude changes slowly, and mostly in one direction, since unsent elements stay in the residual.
    Near it the count falls as a power of the threshold. The exponent is learnt; it gives the threshold for a third more
    candidates than needed, or for more after there were too few. A threshold that is too high costs one more read, one
    that is too low a longer list; the selection does not depend on it.

    Args:
        numel, k: number of elements, and largest number selected from them, both >= 1.

    Attributes:
        max_candidates: largest number of candidates wanted; 0 if they save nothing.
        threshold: the prediction; infinity: none.
        min_magnitude: the smallest magnitude selected at the last step; 0 if it is not known.
    """

    def __init__(self, numel: int, k: int) -> None:
        self._k = k
        self.max_candidates = min(numel, 4 * k + 4096) if k < _WORTHWHILE * numel else 0
        self.forget()

    def forget(self) -> None:
        """Start again, after the residual was emptied."""
        self._steepness, self._aim, self._trend = _FIRST_STEEPNESS, _AIM, 1.0
        self.min_magnitude, self.threshold = 0.0, math.inf

    @property
    def memory(self) -> np.ndarray:
        """All learnt values as one vector."""
        return np.array([self._steepness, self._aim, self._trend, self.min_magnitude, self.threshold])

    @memory.setter
    def memory(self, values: np.ndarray) -> None:
        self._steepness, self._aim, self._trend, self.min_magnitude, self.threshold = values.tolist()

    def learn(self, count: int, min_magnitude: float, num_candidates: int) -> None:
        """Learn from a selection.

        Args:
            count: number of elements selected; `min_magnitude` is the smallest magnitude among them.
            num_candidates: number of elements that reached the threshold.
        """
        if not self.max_candidates:
            return
        if count < max(1, self._k // 2):
            self.threshold, self.min_magnitude = math.inf, 0.0
            return
        if math.isfinite(self.threshold):
            self._adapt(min_magnitude / self.threshold, num_candidates / count)
        growth = min_magnitude / self.min_magnitude if self.min_magnitude else 1.0
        self.min_magnitude = min_magnitude
        self._trend += 0.3 * (min(growth, _MOST_GROWTH) - self._trend)
        below = math.exp(-math.log(self._aim) / self._steepness)
        self.threshold = max(below * min(growth, self._trend) * min_magnitude, _TINY)

    def _adapt(self, above: float, ratio: float) -> None:
        """Adapt to a threshold that was `above` times too low and gave `ratio` candidates per selected element."""
        if ratio < 1:
            self._aim = min(1.3 * self._aim, _MOST_AIM)
        else:
            self._aim += 0.01 * (_AIM - self._aim)
        if ratio > 0 and abs(math.log(above)) > 1e-3:
            seen = math.log(ratio) / math.log(above)
            seen = min(max(seen, _LEAST_STEEPNESS), _MOST_STEEPNESS)
            self._steepness += 0.5 * (seen - self._steepness)


_SMALL = 1 << 16  # below this many elements a direct top-k costs less than a look at a sample
_SAMPLE = 1 << 14


class ResidualView:
    """Answers questions about the magnitudes of a bucket, with the same result with and without candidates.

    The pass over the bucket has collected every element of at least `candidate_threshold`. Questions about larger
    magnitudes are answered from these; others read the bucket once more.

    Args:
        kernels: backend that holds the bucket.
        x: residual of the bucket, a flat float32 Array.
        candidates: every non-zero element with ``|x| >= candidate_threshold``; None: not collected.
        candidate_threshold: smallest magnitude of a candidate; infinity: none.
        sums: sum and sum of squares of the chunks that `Kernels.sampled_sums` reads; None: not computed by the pass.
    """

    def __init__(
        self,
        kernels: Kernels,
        x: Array,
        candidates: Elements | None = None,
        candidate_threshold: float = math.inf,
        sums: tuple[float, float] | None = None,
    ) -> None:
        self.numel = len(x)
        self._kernels, self._x = kernels, x
        self._candidates = NO_ELEMENTS if candidates is None else candidates
        self._floor = math.inf if candidates is None else candidate_threshold
        self._sums = sums

    def largest(self, k: int) -> Elements:
        """Return exactly the k largest; of equal ones the first; zeros never. Ends the view: its memory is reused.

        Without enough candidates, the exact top-k runs on the elements above a threshold guessed from a sample, a
        little too low. Cost: nothing, else one read and a top-k of about 1.5 k, seldom a top-k of the bucket.
        """
        if self._candidates.values.size >= k:
            return self._kernels.keep_largest(self._candidates, k)
        if self.numel >= _SMALL:
            sample = self._kernels.sample(self._x, 0, self.numel // _SAMPLE)
            if (threshold := _low_guess(sample, k / self.numel)) > 0:
                found = self._kernels.at_least(self._x, threshold)
                if found.values.size >= k:
                    return self._kernels.keep_largest(found, k)
        return self._kernels.top_k(self._x, k)

    def at_least(self, threshold: float, most: int) -> Elements:
        """Return the non-zero elements with ``|x| >= threshold``, the `most` largest if there are more. Ends the view.

        Cost: nothing for thresholds from the candidate threshold up, or if there are `most` candidates; else one read.
        """
        if self._candidates.values.size >= most:  # candidates are larger than all other elements
            return self._kernels.keep_at_least(self._kernels.keep_largest(self._candidates, most), threshold)
        if self._is_known(threshold):
            found = self._kernels.keep_at_least(self._candidates, threshold)
        else:
            found = self._kernels.at_least(self._x, threshold)
        return self._kernels.keep_largest(found, most) if found.values.size > most else found

    def count_at_least(self, threshold: float) -> int:
        """Count elements with ``|x| >= threshold``. Cost: nothing from the candidate threshold up, else one read."""
        among = self._kernels.from_host(self._candidates.values) if self._is_known(threshold) else self._x
        return self._kernels.count_at_least(among, threshold)

    def known_low(self, k: int) -> tuple[float, int]:
        """Return a threshold that at least k elements reach, and their number, without a read: the candidates' or 0."""
        count = self._candidates.values.size
        return (self._floor, count) if count >= k else (0.0, self.numel)

    def kth_of_sample(self, start: int, stride: int, k: int) -> float:
        """Return the k-th largest magnitude of ``x[start::stride]``, from the candidates if k of them are in it."""
        offsets = self._candidates.positions - np.int32(start)
        hits = self._candidates.values[(offsets >= 0) & (offsets % np.int32(stride) == 0)]
        if hits.size >= k:
            return self._kernels.kth_largest(hits, k)
        return self._kernels.kth_largest(self._kernels.sample(self._x, start, stride), k)

    def mean_and_deviation(self) -> tuple[float, float]:
        """Return mean and standard deviation, of a sixteenth of a long bucket. Cost: nothing if the pass took sums."""
        total, squares = self._sums if self._sums is not None else self._kernels.sampled_sums(self._x)
        seen = summed_numel(self.numel)
        mean = total / seen
        return mean, math.sqrt(max(squares / seen - mean * mean, 0.0))

    def _is_known(self, threshold: float) -> bool:
        """Return whether every element of at least `threshold`, rounded to float32, is a candidate."""
        return float(np.float32(threshold)) >= self._floor


def _low_guess(sample: np.ndarray, density: float) -> float:
    """Return a magnitude that somewhat more than `density` of the sampled elements reach."""
    expected = density * sample.size
    rank = int(expected + 3 * expected**0.5 + 3)  # three standard deviations of the sample's count
    if rank >= sample.size:
        return 0.0
    return float(np.partition(sample, sample.size - rank)[sample.size - rank])


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
