"""Horovod's broadcasts of parameters and optimizer state, for compressed optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.names import wrap_everywhere
from dgc_horovod.session import base
from dgc_horovod.state.residual_state import MOMENTUM
from dgc_horovod.torch.session.session import Session, session_of


def register() -> None:
    """Replace Horovod's functions, wherever they have been imported, by ones that know compressed optimizers."""
    wrap_everywhere(hvd.broadcast_optimizer_state, _of_optimizer_state)
    wrap_everywhere(hvd.broadcast_parameters, _of_parameters)


def _of_parameters(stock: Callable[..., None]) -> Callable[..., None]:
    def broadcast_parameters(
        params: dict[str, torch.Tensor] | Iterable[Any], *place: object, **named_place: object
    ) -> None:
        stock(params, *place, **named_place)
        entries: Iterable[Any] = params.values() if isinstance(params, dict) else params
        base.weights_set(entry[1] if isinstance(entry, tuple) else entry for entry in entries)

    return broadcast_parameters


def _of_optimizer_state(stock: Callable[..., None]) -> Callable[..., None]:
    def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: torch.nn.Module | None = None) -> None:
        session = session_of(optimizer)
        if session is None:
            stock(optimizer, root_rank, model)
            return
        if not (_is_stateless(session) and optimizer.process_set.process_set_id == 0):
            with unmoved(session):  # on every rank alike
                stock(optimizer, root_rank, model)
        _follow(session, optimizer.process_set, root_rank)

    return broadcast_optimizer_state


def _is_stateless(session: Session) -> bool:
    """Return whether the optimizer has no state (SGD without momentum): stock then broadcasts no options either."""
    groups = session.optimizer.param_groups
    return MOMENTUM in session.update.stock.slots and not any(group["momentum"] for group in groups)


@contextmanager
def unmoved(session: Session) -> Iterator[None]:
    """Restore the weights afterwards: to fill an empty optimizer state, stock Horovod makes a step."""
    empty = not session.optimizer.state_dict()["state"]
    before = [p.detach().clone() for p in session.exchange.names] if empty else []
    yield
    with torch.no_grad():
        for p, value in zip(session.exchange.names, before, strict=False):
            p.copy_(value)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group, such as learning rates."""
    return [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]


def _follow(session: Session, process_set: hvd.ProcessSet, root_rank: int) -> None:
    """Discard u and v of every rank if the root has loaded a state since its last step.

    Before the first step every ``p.grad`` is then zero, as with stock Horovod.
    """
    optimizer, ranks = session.optimizer, process_set.ranks
    if ranks is None or root_rank in ranks:
        own = session.loaded, _options(optimizer) if _is_stateless(session) else []
        loaded, options = hvd.broadcast_object(own, root_rank, name="dgc.loaded", process_set=process_set)
        for group, theirs in zip(optimizer.param_groups, options, strict=False):
            group.update(theirs)
        if loaded and not session.loaded:
            session.forget()
        if loaded:
            session.strategy.share_loaded(root_rank if ranks is None else list(ranks).index(root_rank))
    if session.exchange.steps == 0:
        for p in session.exchange.names:
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
