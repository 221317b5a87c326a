"""Whether gradients can travel as half precision, which nobody has asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgc_horovod.planning.half import LARGEST, LOST


def fits(gradients: Sequence[torch.Tensor], factor: float) -> bool:
    """Whether half precision has room for every tensor's largest elements, and for its small ones.

    Args:
        gradients: dense gradients, any shape, averaged over the ranks.
        factor: number of ranks, which are summed before they are divided, times the loss scale, > 0.

    Returns:
        Whether all are fp32 or fp16, none exceeds an eighth of fp16's range, and none loses 1% of its norm.

    Cost: three passes over the gradients.
    """
    return all(_fits(gradient, factor) for gradient in gradients)


def _fits(gradient: torch.Tensor, factor: float) -> bool:
    if gradient.dtype == torch.float16:
        return True
    if gradient.dtype != torch.float32:
        return False  # float64's digits, bfloat16's range
    largest = float(gradient.abs().max()) if gradient.numel() else 0.0
    if not largest * factor <= LARGEST:
        return False
    lost = gradient - gradient.half().float()
    return bool(lost.norm() <= LOST * gradient.norm())
