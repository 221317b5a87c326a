"""``hvd.broadcast_optimizer_state`` for compressed optimizers, as stock leaves things behind."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.names import replace_everywhere


def register() -> None:
    """From now on Horovod's function, wherever it has been imported, knows compressed optimizers."""
    stock = hvd.broadcast_optimizer_state
    if hasattr(stock, "_dgc_stock"):
        return

    @functools.wraps(stock)
    def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
        stock(optimizer, root_rank, model)
        if hasattr(optimizer, "_dgc_update") and optimizer.process_set.included():
            _follow(optimizer, root_rank)

    broadcast_optimizer_state._dgc_stock = stock  # type: ignore[attr-defined]
    replace_everywhere(stock, broadcast_optimizer_state)


def _follow(optimizer: Any, root_rank: int) -> None:
    """If the root has loaded a state since its last step, training goes on from there: every rank's u and v are void.

    Before the first step every ``p.grad`` is then zero, as with stock Horovod.
    """
    ranks = optimizer.process_set.ranks
    if ranks is None or root_rank in ranks:
        loaded = hvd.broadcast_object(
            optimizer._dgc_loaded, root_rank, name="dgc.loaded", process_set=optimizer.process_set
        )
        if loaded and not optimizer._dgc_loaded:
            optimizer._dgc_forget()
        if loaded:
            optimizer._dgc_share_loaded(root_rank)
    if optimizer._dgc.buckets.steps == 0:
        for p in optimizer._dgc.names:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
