"""Adam's second moment where it is learnt in dense steps, is the same on every rank, and then stays."""

from __future__ import annotations

import numpy as np

FLOOR = 1e-2  # of the mean over a tensor


def bounded(second: np.ndarray) -> np.ndarray:
    """The second moment of a tensor that the steps to come divide by the root of.

    A row that had no gradient in the dense steps would be moved by ``g / eps``. So no element is below a hundredth of
    the tensor's mean. Where nothing was learnt it is infinite, and nothing moves: a whole tensor of zeros, and elements
    that are not finite.

    Args:
        second: second moments of the whole tensor, float32, each divided by its ``1-b2**step``.

    Source: the bound is ours; from 0 to 0.01 it makes no difference to the quality study, 0.1 costs 0.01 nats.
    """
    finite = np.isfinite(second)
    mean = float(np.mean(second[finite], dtype=np.float64)) if finite.any() else 0.0
    if not mean:
        return np.full_like(second, np.inf)
    return np.where(finite, np.maximum(second, np.float32(FLOOR * mean)), np.float32(np.inf))
