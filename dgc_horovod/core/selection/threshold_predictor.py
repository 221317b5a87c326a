"""Guesses, a step ahead, how large an element must be to be a candidate: what makes selection cost no extra pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_WORTHWHILE = 1 / 8  # of a range: where more is sent, candidates save nothing
_AIM, _MOST_AIM = 1.35, 3.0  # candidates per selected element
_TINY = float(np.finfo(np.float32).tiny)
_MOST_GROWTH = 1.1
_FIRST_STEEPNESS, _LEAST_STEEPNESS, _MOST_STEEPNESS = 8.0, 1.0, 60.0


class ThresholdPredictor:
    """Of each range, a magnitude that somewhat more than k elements will reach at the next step.

    The smallest magnitude that is sent moves slowly, and mostly one way, since what is not sent stays in the residual.
    Around it the count falls as a power of the threshold; its exponent, which is learnt, tells how far below to look
    for a third more candidates than are needed, or for more still after there have been too few. A threshold that is
    too high costs one more read, one that is too low a longer list; what is selected is the same for every one.

    Args:
        numels, ks: number of elements of each range, and of those selected of it at most, both >= 1.
        threshold: magnitude of rule "threshold", > 0, below which nothing is sent; None for other rules.
    """

    def __init__(self, numels: Sequence[int], ks: Sequence[int], threshold: float | None = None) -> None:
        self._ks, self._threshold = list(ks), threshold
        self._useful = [k < _WORTHWHILE * n for n, k in zip(numels, ks, strict=True)]
        self.max_candidates = sum(
            min(n, 4 * k + 4096) for n, k, useful in zip(numels, ks, self._useful, strict=True) if useful
        )
        self.forget()

    def forget(self) -> None:
        """Start anew: the residual has been emptied."""
        ranges = len(self._ks)
        self._steepness, self._aim, self._trend = [_FIRST_STEEPNESS] * ranges, [_AIM] * ranges, [1.0] * ranges
        self._last = [0.0] * ranges
        self.thresholds = [self._unknown(number) for number in range(ranges)]

    @property
    def min_magnitude(self) -> float:
        """The smallest magnitude that was selected at the last step, of all ranges; 0 where it is not known."""
        return min((value for value in self._last if value), default=0.0)

    @property
    def memory(self) -> np.ndarray:
        """All that is learnt, as one vector."""
        return np.concatenate([self._steepness, self._aim, self._trend, self._last, self.thresholds])

    @memory.setter
    def memory(self, values: np.ndarray) -> None:
        self._steepness, self._aim, self._trend, self._last, self.thresholds = values.reshape(5, -1).tolist()

    def learn(self, number: int, count: int, min_magnitude: float, num_candidates: float) -> None:
        """Learn from what was selected from one range.

        Args:
            number: index of the range, from 0.
            count: number of elements selected; `min_magnitude` is the smallest magnitude among them.
            num_candidates: number of elements that reached its threshold; an estimate where they had no room.
        """
        if not self._useful[number]:
            return
        few = self._ks[number] if self._threshold is not None else max(1, self._ks[number] // 2)
        if count < few:
            self.thresholds[number], self._last[number] = self._unknown(number), 0.0
            return
        if math.isfinite(self.thresholds[number]):
            self._adapt(number, min_magnitude / self.thresholds[number], num_candidates / count)
        growth = min_magnitude / self._last[number] if self._last[number] else 1.0
        self._last[number] = min_magnitude
        self._trend[number] += 0.3 * (min(growth, _MOST_GROWTH) - self._trend[number])
        below = math.exp(-math.log(self._aim[number]) / self._steepness[number])
        guess = below * min(growth, self._trend[number]) * min_magnitude
        self.thresholds[number] = max(guess, self._threshold or _TINY)

    def _unknown(self, number: int) -> float:
        """The threshold while there is nothing to guess from: none, or the threshold below which nothing is sent."""
        return self._threshold if self._threshold is not None and self._useful[number] else math.inf

    def _adapt(self, number: int, above: float, ratio: float) -> None:
        """The threshold was `above` times too low and brought `ratio` candidates per selected element."""
        if ratio < 1:
            self._aim[number] = min(1.3 * self._aim[number], _MOST_AIM)
        else:
            self._aim[number] += 0.01 * (_AIM - self._aim[number])
        if ratio > 0 and abs(math.log(above)) > 1e-3:
            seen = math.log(ratio) / math.log(above)
            seen = min(max(seen, _LEAST_STEEPNESS), _MOST_STEEPNESS)
            self._steepness[number] += 0.5 * (seen - self._steepness[number])
