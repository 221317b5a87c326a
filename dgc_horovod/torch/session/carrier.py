"""The carrier of a session, which runs its collectives: Horovod, or torch.distributed with or without DDP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from dgc_horovod.torch.gradients.collectives import Collectives, ReduceSettings

if TYPE_CHECKING:
    from dgc_horovod.torch.session.records import Result
    from dgc_horovod.torch.session.session import Session

Parameter = torch.Tensor


class Stock:
    """The framework's own exchange, which ``auto`` begins with.

    Attributes:
        name: name of the exchange, for messages.
    """

    name: str

    @property
    def on_gloo(self) -> bool:
        """Whether it runs over Gloo on a CPU."""
        raise NotImplementedError

    def start(self, p: Parameter) -> Result:
        """Start the exchange of ``p.grad``, if the carrier's `exchanges_in_backward` is false."""
        raise NotImplementedError

    def take_accumulates(self) -> bool:
        """Return, before a step, whether it has several exchanged gradients, or none; reset the record."""
        return False

    def cleared(self) -> None:
        """Record that the script has cleared its gradients."""


class Carrier:
    """The ranks of one optimizer, and the delivery of its gradients and updates.

    Args:
        names: name of every parameter of the optimizer.
        settings: reduction of the gradients.
        passes_per_step: backward passes that are summed before one exchange, >= 1.
    """

    exchanges_in_backward = False  # whether ``p.grad`` has updates when ``backward`` returns
    elastic = False  # whether the ranks may change during the job
    stock: Stock | None = None  # the framework's own exchange, if there is one

    def __init__(self, names: Mapping[Parameter, str], settings: ReduceSettings, passes_per_step: int = 1) -> None:
        self.names, self.settings, self.passes_per_step = names, settings, passes_per_step

    @property
    def group_name(self) -> str:
        """Name of the group of ranks, equal on each of them."""
        raise NotImplementedError

    def boundaries(self, parameters: Mapping[str, Parameter]) -> dict[Parameter, int]:
        """Return a number for each parameter; tensors of different numbers never share a bucket."""
        raise NotImplementedError

    def agreed_fields(self, session: Session) -> dict[str, str]:
        """Return the fields that must be equal on all ranks."""
        raise NotImplementedError

    def agree(self, session: Session) -> None:
        """Compare `agreed_fields` with the other ranks.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        raise NotImplementedError

    def transports(self, session: Session) -> Mapping[str, Collectives]:
        """Return the transport of each group of ranks, for `exchange_of`."""
        raise NotImplementedError

    def deliver(self, session: Session) -> None:
        """Deliver every gradient to `session` from now on, as long as it is alive; here by hooks of parameters."""
        if session.strategy.takes_gradients:
            session.hook_gradients()

    def started(self, session: Session) -> None:
        """Give warnings to the user after the session has started."""

    def agree_anew(self) -> None:
        """Compare fields again before the next exchange, after a change of ranks."""

    def follow(self, session: Session) -> None:
        """Adapt `session` to the present ranks."""

    def check_ranks(self, session: Session) -> None:
        """Check before an exchange that all ranks are about to make the same one, for carriers that need it."""

    def meet(self, session: Session, name: str) -> None:
        """Wait for all ranks, for carriers whose collectives match by order."""

    def put(self, p: Parameter, update: torch.Tensor, taken: set[int]) -> None:
        """Write an update to the memory of ``p.grad``, or to new memory if that is `taken`: autograd may share it."""
        assert p.grad is not None
        if p.grad.is_sparse:
            p.grad = update
        elif update is not p.grad:
            if p.grad.data_ptr() in taken:
                p.grad = torch.empty_like(p)
            p.grad.copy_(update)
        if not p.grad.is_sparse and p.grad.numel():
            taken.add(p.grad.data_ptr())

    def withhold(self, parameters: Collection[Parameter]) -> dict[Parameter, torch.Tensor]:
        """Take updates that must not be applied out of ``p.grad``, and return them."""
        return {}

    def before_step(self, session: Session) -> None:
        """Raise UnsupportedUse for a step that has nothing to apply."""
