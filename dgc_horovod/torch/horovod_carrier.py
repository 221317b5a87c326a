"""Horovod as the carrier of a session: arguments, collectives, process sets, and stock Horovod's exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.util import split_list
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import envvars
from dgc_horovod.core import budget
from dgc_horovod.core.nodes import LAST_STEP_SECONDS, Launched, declare, declared, meet_at_exit
from dgc_horovod.exchange.contract import BETWEEN, INSIDE
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.state import checkpoint
from dgc_horovod.torch.gradients.collectives import Collectives, Parameter, Pending, ReduceSettings
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.records import Result
from dgc_horovod.torch.session.session import Session
from dgc_horovod.torch.transport import WITHOUT_CUDA, HorovodCollectives, needs_host

STOCK = "stock Horovod"


def node_process_sets(node_size: int | None = None) -> list[hvd.ProcessSet]:
    """Return the process sets of a hierarchical exchange, for ``hvd.init(process_sets=node_process_sets(G))``.

    Args:
        node_size: number of workers of a node, >= 1, the same on every rank; None: DGC_NODE_SIZE, which `dgcrun` sets.

    Returns:
        The sets, for `hvd.init`; empty for one node, one worker a node, or workers that do not fill nodes.
    """
    return declare(hvd.ProcessSet, node_size)


def _meet() -> None:
    HorovodCollectives(hvd.global_process_set, "end", LAST_STEP_SECONDS).gather_bytes(b"here", "meeting")


class HorovodCarrier(Carrier):
    """The ranks of a process set.

    Args:
        optimizer: optimizer with the attributes that Horovod's constructor has set.
    """

    stock = STOCK

    def __init__(self, optimizer: _DistributedOptimizer) -> None:
        settings = ReduceSettings(
            optimizer.op == hvd.Average, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense
        )
        number, passes = optimizer.process_set.process_set_id, optimizer.backward_passes_per_step
        super().__init__(optimizer._parameter_names, settings, f"process set {number}", number, passes)
        self.process_set, self.op, self._groups = optimizer.process_set, optimizer.op, optimizer._groups
        self._optimizer = weakref.ref(optimizer)

    def collectives(self, tag: str) -> Collectives:
        return HorovodCollectives(self.process_set, tag)

    def patient(self) -> Collectives:
        return HorovodCollectives(self.process_set, checkpoint.CALLS, envvars.checkpoint_seconds())

    def launched(self) -> Launched:
        return Launched.of(hvd)

    def speed(self, session: Session) -> float:
        on_gpus = hvd.nccl_built() and all(p.is_cuda for p in session.parameters.values())
        return budget.NCCL_SPEED if on_gpus else budget.HOST_SPEED

    def of_nodes(self, topology: Topology, tag: str) -> Mapping[str, Collectives]:
        meet_at_exit(_meet)
        return {
            BETWEEN: HorovodCollectives(declared(topology.between), f"{tag}.between{topology.local_rank}"),
            INSIDE: HorovodCollectives(declared(topology.inside), f"{tag}.inside{topology.node}"),
        }

    def boundaries(self, parameters: Mapping[str, Parameter]) -> dict[Parameter, int]:
        """See `Carrier`: equal for parameters of one of Horovod's `groups` on one device."""
        groups = self._groups
        lists = split_list(list(parameters.values()), groups) if isinstance(groups, int) else groups or []
        group_of = {p: i for i, group in enumerate(lists) for p in group}
        keys: dict[Any, int] = {}
        return {p: keys.setdefault((group_of.get(p, -1), p.device), len(keys)) for p in parameters.values()}

    def agreed_fields(self, session: Session) -> dict[str, str]:
        """See `Carrier`; with Horovod's arguments."""
        places = session.boundaries
        return {
            **super().agreed_fields(session),
            "op": str(int(self.op)),
            "backward_passes_per_step": str(session.passes.per_step),
            "gradient_predivide_factor": str(float(self.settings.gradient_predivide_factor)),
            "sparse_as_dense": str(self.settings.sparse_as_dense),
            "bucket boundaries": "\n".join(f"{name} {places[p]}" for name, p in session.parameters.items()),
        }

    def started(self, session: Session) -> None:
        if any(needs_host(p) for p in session.parameters.values()):
            session.tell_once("without CUDA", WITHOUT_CUDA)

    def put(self, p: Parameter, update: torch.Tensor, taken: set[int]) -> None:
        """Give ``p.grad`` the memory of the update, as stock Horovod does; it stays the same tensor object."""
        assert p.grad is not None
        if p.grad.is_sparse:
            p.grad.zero_().add_(update if update.is_sparse else update.to_sparse())
        else:
            p.grad.set_(update)  # type: ignore[call-overload]

    @property
    def stock_on_gloo(self) -> bool:
        return bool(hvd.gloo_enabled())

    def start_stock(self, p: Parameter) -> Result:
        handle, context = _DistributedOptimizer._allreduce_grad_async(self._optimizer(), p)
        return partial(self._taken, p, handle, context)

    def _taken(self, p: Parameter, handle: int | Callable[[], torch.Tensor], context: object) -> torch.Tensor:
        """Wait for an allreduce with a deadline; Horovod's own wait for a stopped rank never ends."""
        optimizer: Any = self._optimizer()
        assert optimizer is not None  # it owns the session
        if callable(handle):
            result = handle()
        else:
            pending = Pending(handle, p, f"allreduce.{self.names[p]}")
            result = optimizer._dgc.exchange.collectives.wait(pending)
        found: torch.Tensor = optimizer._compression.decompress(result, context)
        return found
