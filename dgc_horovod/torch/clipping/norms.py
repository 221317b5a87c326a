"""Norms of gradients, each read once, and clipping of gradients averaged by the framework's own exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch


def clip_all(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clip as torch's `clip_grad_norm_`, with sparse gradients too, which that function does not support."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        torch.nn.utils.clip_grad_norm_(list(parameters), limit)
        return
    norm = total_norm([finite_norm(grad, 2.0) for grad in grads])
    for grad in grads if norm > limit else []:
        grad.mul_(limit / norm)


def total_norm(norms: Sequence[float], p: float = 2.0) -> float:
    """Return the p-norm of all elements from the p-norms of the parts."""
    if not norms:
        return 0.0
    if math.isinf(p):
        return max(norms)
    return math.fsum(norm**p for norm in norms) ** (1 / p)


def finite_norm(gradient: torch.Tensor, p: float) -> float:
    """Return the p-norm in fp32; elements that are not finite count as zero, as they enter the momentum."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.dtype == torch.float64:  # torch computes no fp32 norm of it
        gradient = gradient.float()
    norm = float(torch.linalg.vector_norm(gradient, p, dtype=torch.float32))
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(torch.nan_to_num(gradient.float(), 0.0, 0.0, 0.0), p))


def limit_averages(optimizer: torch.optim.Optimizer, limit: float | None) -> None:
    """Clip gradients that stock Horovod or DDP has averaged, before each step.

    Args:
        optimizer: optimizer of stock Horovod, or one whose gradients DDP exchanges.
        limit: limit of the L2 norm of all gradients, > 0; None: no limit.
    """
    if limit is not None:
        optimizer.register_step_pre_hook(partial(_clip, limit))


def _clip(limit: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    if getattr(optimizer, "_handles", None):  # stock Horovod's step runs the hooks before it waits, and again after
        return
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients later
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_all(parameters, limit if scale is None else limit * float(scale))
