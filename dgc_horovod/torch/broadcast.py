"""Horovod's broadcasts where there are compressed optimizers, as stock leaves things behind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.names import replace_everywhere
from dgc_horovod.torch.wrapping import owners


def register() -> None:
    """From now on Horovod's functions, wherever they have been imported, know compressed optimizers."""
    if not hasattr(hvd.broadcast_optimizer_state, "_dgc_stock"):
        _register_optimizer_state(hvd.broadcast_optimizer_state)
        _register_parameters(hvd.broadcast_parameters)


def _register_parameters(stock: Any) -> None:
    @functools.wraps(stock)
    def broadcast_parameters(params: Any, *place: Any, **named_place: Any) -> None:
        stock(params, *place, **named_place)
        for optimizer in owners.live():
            if optimizer._dgc_in_round:  # of local steps
                optimizer._dgc_rounds.restart_of(list(_tensors(params)))

    broadcast_parameters._dgc_stock = stock  # type: ignore[attr-defined]
    replace_everywhere(stock, broadcast_parameters)


def _tensors(params: Any) -> Iterator[torch.Tensor]:
    """Those of a state, or of a list of parameters, with or without names."""
    for entry in params.values() if isinstance(params, dict) else params:
        value = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(value, torch.Tensor):
            yield value


def _register_optimizer_state(stock: Any) -> None:
    @functools.wraps(stock)
    def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
        if not hasattr(optimizer, "_dgc_update") or not optimizer.process_set.included():
            stock(optimizer, root_rank, model)
            return
        if not (_is_stateless(optimizer) and optimizer.process_set.process_set_id == 0):
            with unmoved(optimizer):  # a part of the ranks calls what the others call
                stock(optimizer, root_rank, model)
        _follow(optimizer, root_rank)

    broadcast_optimizer_state._dgc_stock = stock  # type: ignore[attr-defined]
    replace_everywhere(stock, broadcast_optimizer_state)


def _is_stateless(optimizer: Any) -> bool:
    """Whether there is nothing that stock would broadcast, nor the options then: SGD without momentum."""
    return optimizer._dgc_update.kind == "sgd" and not any(group["momentum"] for group in optimizer.param_groups)


@contextmanager
def unmoved(optimizer: Any) -> Iterator[None]:
    """Weights stay: to fill an empty state, which some optimizers have before their first step, Horovod takes one."""
    empty = not optimizer.state_dict()["state"]
    before = [p.detach().clone() for p in optimizer._dgc.names] if empty else []
    yield
    with torch.no_grad():
        for p, value in zip(optimizer._dgc.names, before, strict=False):
            p.copy_(value)


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """Learning rates and the like, of each group."""
    return [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]


def _follow(optimizer: Any, root_rank: int) -> None:
    """If the root has loaded a state since its last step, training goes on from there: every rank's u and v are void.

    Before the first step every ``p.grad`` is then zero, as with stock Horovod.
    """
    ranks = optimizer.process_set.ranks
    if ranks is None or root_rank in ranks:
        own = optimizer._dgc_loaded, _options(optimizer) if _is_stateless(optimizer) else []
        found = hvd.broadcast_object(own, root_rank, name="dgc.loaded", process_set=optimizer.process_set)
        loaded, options = found
        for group, theirs in zip(optimizer.param_groups, options, strict=False):
            group.update(theirs)
        if loaded and not optimizer._dgc_loaded:
            optimizer._dgc_forget()
        if loaded:
            optimizer._dgc_share_loaded(root_rank)
    if optimizer._dgc.buckets.steps == 0:
        for p in optimizer._dgc.names:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
