"""``clip_norm`` of a compression that has come to nothing: it limits the averaged gradient, before the step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from dgc_horovod.torch.clipping.norms import clip_all


def limit_averages(optimizer: torch.optim.Optimizer, limit: float | None) -> None:
    """Clip what stock Horovod or DDP brings.

    Args:
        optimizer: optimizer of stock Horovod, or one whose gradients DDP exchanges.
        limit: limit of the L2 norm of all gradients, > 0; None: there is none.
    """
    if limit is not None:
        optimizer.register_step_pre_hook(partial(_clip, limit))


def _clip(limit: float, optimizer: Any, *_: Any) -> None:
    if getattr(optimizer, "_handles", None):  # the step of stock Horovod comes to the hooks before it waits, and after
        return
    scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, whose gradients are scaled still
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clip_all(parameters, limit if scale is None else limit * float(scale))
