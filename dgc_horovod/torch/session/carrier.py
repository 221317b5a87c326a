"""Who carries the bytes of a session: Horovod, or torch.distributed with DistributedDataParallel or without."""

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
        name: whose it is, in words.
    """

    name: str

    @property
    def on_gloo(self) -> bool:
        """Whether it is Gloo's, on a CPU."""
        raise NotImplementedError

    def start(self, p: Parameter) -> Result:
        """Exchange ``p.grad``, where a carrier's `exchanges_in_backward` is false."""
        raise NotImplementedError

    def take_accumulates(self) -> bool:
        """Before a step: whether the script has made it of several exchanged gradients, or of none."""
        return False

    def cleared(self) -> None:
        """The script has cleared its gradients."""


class Carrier:
    """The ranks of one optimizer, and how its gradients come to the session and go back.

    Args:
        names: name of every parameter of the optimizer.
        settings: how gradients are combined.
        passes_per_step: backward passes that are summed before one exchange, >= 1.
    """

    exchanges_in_backward = False  # whether updates stand in ``p.grad`` when ``backward`` returns
    elastic = False  # whether the ranks may change while the job runs
    stock: Stock | None = None  # the framework's own exchange, where there is one

    def __init__(self, names: Mapping[Parameter, str], settings: ReduceSettings, passes_per_step: int = 1) -> None:
        self.names, self.settings, self.passes_per_step = names, settings, passes_per_step

    @property
    def group_name(self) -> str:
        """Name of the ranks that take part, the same on each of them."""
        raise NotImplementedError

    def boundaries(self, parameters: Mapping[str, Parameter]) -> dict[Parameter, int]:
        """A number for each parameter; tensors of different numbers never share a bucket."""
        raise NotImplementedError

    def agreed_fields(self, session: Session) -> dict[str, str]:
        """What all ranks must have in common."""
        raise NotImplementedError

    def agree(self, session: Session) -> None:
        """Compare it with the other ranks.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        raise NotImplementedError

    def transports(self, session: Session) -> Mapping[str, Collectives]:
        """The transport of each group of ranks, for `exchange_of`."""
        raise NotImplementedError

    def deliver(self, session: Session) -> None:
        """From now on let every gradient come to `session`, as long as that is alive; here by hooks of parameters."""
        if session.strategy.takes_gradients:
            session.hook_gradients()

    def started(self, session: Session) -> None:
        """Everything is in its place: what is to be said to the user."""

    def agree_anew(self) -> None:
        """The ranks are others: they agree before the next exchange."""

    def follow(self, session: Session) -> None:
        """Work with the ranks that there are."""

    def check_ranks(self, session: Session) -> None:
        """Before a gradient is exchanged: see whether all ranks are about to do the same, where they might not be."""

    def meet(self, session: Session, name: str) -> None:
        """Wait until all ranks are here, where a rank that is alone would meet packets of the others."""

    def put(self, p: Parameter, update: torch.Tensor, taken: set[int]) -> None:
        """Give ``p.grad`` an update, in its own memory, unless that is `taken`: autograd lets sums share a gradient."""
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
        """Take updates out of ``p.grad`` that no weight is to get."""
        return {}

    def before_step(self, session: Session) -> None:
        """Raise UnsupportedUse for a step that has nothing to apply."""
