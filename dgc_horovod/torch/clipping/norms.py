"""Norms of gradients, each read once, and limits of what the framework's own exchange has averaged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch

Parameter = torch.Tensor


def clip_all(parameters: Iterable[Parameter], limit: float) -> None:
    """As torch's `clip_grad_norm_`, which has no norm of a sparse gradient."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        torch.nn.utils.clip_grad_norm_(list(parameters), limit)
        return
    norm = total_norm([finite_norm(grad, 2.0) for grad in grads])
    for grad in grads if norm > limit else []:
        grad.mul_(limit / norm)


def total_norm(norms: Sequence[float], p: float = 2.0) -> float:
    """The p-norm of all elements, from the p-norms of the parts."""
    if not norms:
        return 0.0
    if math.isinf(p):
        return max(norms)
    return math.fsum(norm**p for norm in norms) ** (1 / p)


def finite_norm(gradient: torch.Tensor, p: float) -> float:
    """The p-norm in fp32; what is not finite counts as zero, as it does where it enters the momentum."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.dtype == torch.float64:  # of which torch takes no norm in less precision
        gradient = gradient.float()
    norm = float(torch.linalg.vector_norm(gradient, p, dtype=torch.float32))
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(torch.nan_to_num(gradient.float(), 0.0, 0.0, 0.0), p))


def limit_averages(optimizer: torch.optim.Optimizer, limit: float | None) -> None:
    """Clip what stock Horovod or DDP brings.

    Args:
        optimizer: optimizer of stock Horovod, or one whose gradients DDP exchanges.
        limit: limit of the L2 norm of all gradients, > 0; None: there is none.
    """
    if limit is not None:
        optimizer.register_step_pre_hook(partial(_clip, limit))


def _clip(limit: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    if getattr(optimizer, "_handles", None):  # the step of stock Horovod comes to the hooks before it waits, and after
        return
    scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, whose gradients are scaled still
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_all(parameters, limit if scale is None else limit * float(scale))
