"""The carrier of a session, which runs its collectives: Horovod, or torch.distributed with or without DDP."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch

from dgc_horovod.config import FIELD_NAMES
from dgc_horovod.config_check import check_agreement
from dgc_horovod.core.bucketing import HOST_SPEED, TensorSpec
from dgc_horovod.core.nodes import Launched, agree
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.torch.gradients.collectives import Collectives, Parameter, ReduceSettings

if TYPE_CHECKING:
    from dgc_horovod.torch.session.records import Result
    from dgc_horovod.torch.session.session import Session


class Carrier:
    """The ranks of one optimizer, and the delivery of its gradients and updates.

    Args:
        names: name of every parameter of the optimizer, sorted by name, as checkpoints have a digest of them in order.
        settings: reduction of the gradients.
        group_name: name of the group of ranks, equal on each of them.
        group_number: number of the group in checkpoints; 0: all ranks of the job.
        passes_per_step: backward passes that are summed before one exchange, >= 1.
    """

    exchanges_in_backward = False  # whether ``p.grad`` has updates when ``backward`` returns
    elastic = False  # whether the ranks may change during the job
    agreed = True  # whether the present ranks have compared `agreed_fields`
    stock = ""  # name of the framework's own exchange, which ``auto`` begins with; "": there is none

    def __init__(
        self,
        names: Mapping[Parameter, str],
        settings: ReduceSettings,
        group_name: str,
        group_number: int,
        passes_per_step: int,
    ) -> None:
        self.names, self.settings, self.passes_per_step = names, settings, passes_per_step
        self.group_name, self.group_number = group_name, group_number

    # -- the ranks

    def collectives(self, tag: str) -> Collectives:
        """Return a transport of these ranks, with a `tag` of its own."""
        raise NotImplementedError

    def patient(self) -> Collectives:
        """Return a transport for checkpoints, with a timeout for slow disks; every rank must call it."""
        raise NotImplementedError

    def launched(self) -> Launched:
        """Return the place of this rank in the job."""
        raise NotImplementedError

    def speed(self, session: Session) -> float:
        """Return the speed of an exchange inside a node, see `bucketing.loss_by_nodes`."""
        return HOST_SPEED

    def of_nodes(self, topology: Topology, tag: str) -> Mapping[str, Collectives]:
        """Return the transports of `BETWEEN` and `INSIDE` on a topology that every rank uses."""
        raise NotImplementedError

    def transports(self, session: Session) -> Mapping[str, Collectives]:
        """Return the transport of each group of ranks if all can use a hierarchical exchange, else that of all."""
        collectives = self.collectives(session.tag)
        specs = [TensorSpec(name, tuple(p.shape)) for name, p in session.parameters.items()]
        averages, speed = self.settings.averages, self.speed(session)
        topology = agree(collectives, session.config, self.launched(), averages, specs, speed)
        return {ALL: collectives, **(self.of_nodes(topology, session.tag) if topology.node_size > 1 else {})}

    # -- agreement

    def boundaries(self, parameters: Mapping[str, Parameter]) -> dict[Parameter, int]:
        """Return a number for each parameter, one for each device; tensors of different numbers share no bucket."""
        devices: dict[torch.device, int] = {}
        return {p: devices.setdefault(p.device, len(devices)) for p in parameters.values()}

    def agreed_fields(self, session: Session) -> dict[str, str]:
        """Return the fields that must be equal on all ranks: one text each, lists with one entry a line."""
        parameters, scaler, settings = session.parameters, session.scaler, self.settings
        return {
            "optimizer": type(session.optimizer).__name__,
            "grad_scaler": str(scaler is not None and scaler.is_enabled()),
            **{f"config.{name}": repr(getattr(session.config, name)) for name in FIELD_NAMES},
            "tensor count": str(len(parameters)),
            "names": "\n".join(parameters),
            "shapes": "\n".join(f"{name} {tuple(p.shape)}" for name, p in parameters.items()),
            "dtypes": "\n".join(f"{name} {p.dtype}" for name, p in parameters.items()),
            "op": "average" if settings.averages else "sum",
            "backward_passes_per_step": str(session.passes.per_step),
            "gradient_predivide_factor": str(float(settings.gradient_predivide_factor)),
            "sparse_as_dense": str(settings.sparse_as_dense),
            "bucket boundaries": "\n".join(f"{name} {session.boundaries[p]}" for name, p in parameters.items()),
            "unfinished local rounds of earlier optimizers (call exchange())": str(len(session.still_apart())),
        }

    def agree(self, session: Session) -> None:
        """Compare `agreed_fields` with the other ranks.

        Raises:
            RankMismatch: on every rank, if they differ.
        """
        check_agreement(self.collectives("start"), self.agreed_fields(session))

    def follow(self, session: Session) -> None:
        """Adapt `session` to the present ranks."""

    def check_ranks(self, session: Session) -> None:
        """Check before an exchange that all ranks are about to make the same one, for carriers that need it."""

    # -- gradients and updates

    def deliver(self, session: Session) -> None:
        """Deliver every gradient to `session` from now on, as long as it is alive; here by hooks of parameters."""
        if session.strategy.takes_gradients:
            session.hook_gradients()

    def started(self, session: Session) -> None:
        """Give warnings to the user after the session has started."""

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

    # -- the framework's own exchange

    @property
    def stock_on_gloo(self) -> bool:
        """Whether it runs over Gloo on a CPU."""
        raise NotImplementedError

    def start_stock(self, p: Parameter) -> Result:
        """Start it for ``p.grad``, if `exchanges_in_backward` is false."""
        raise NotImplementedError

    def stock_accumulates(self) -> bool:
        """Return, before a step, whether it has exchanged several gradients, or none; reset the record."""
        return False

    def cleared(self) -> None:
        """Record that the script has cleared its gradients."""
