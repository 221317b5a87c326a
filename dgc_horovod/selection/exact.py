"""Exact top-k: the k largest magnitudes, ties to the lower position (TopK-SGD; DGC without sampling)."""

from __future__ import annotations

import numpy as np

from dgc_horovod.ops.schema import Array, Kernels
from dgc_horovod.selection.base import SelectionContext, cut_to_k

_SMALL = 1 << 16  # below this many elements a direct top-k costs less than a look at a sample
_SAMPLE = 1 << 14


def select(kernels: Kernels, x: Array, k: int, context: SelectionContext) -> np.ndarray:
    """The k largest ``|x|`` exactly, at every call.

    A threshold guessed from a sample, a little too low, leaves few candidates, and the exact top-k runs
    on those: if they are at least k, the k largest of x are among them. If the guess was too high, top-k
    runs on everything. Cost: one read of x and a top-k of about 1.5 k, seldom a top-k of x.
    """
    if len(x) >= _SMALL and (threshold := _low_guess(kernels.sample(x, 0, len(x) // _SAMPLE), k / len(x))) > 0:
        candidates = kernels.positions_at_least(x, threshold)
        if candidates.size >= k:
            return cut_to_k(kernels, x, candidates, k)
    return kernels.top_k(x, k)


def _low_guess(sample: np.ndarray, density: float) -> float:
    """A magnitude that somewhat more than `density` of the sampled elements reach."""
    expected = density * sample.size
    rank = int(expected + 3 * expected**0.5 + 3)  # three standard deviations of the sample's count
    if rank >= sample.size:
        return 0.0
    return float(np.partition(sample, sample.size - rank)[sample.size - rank])
