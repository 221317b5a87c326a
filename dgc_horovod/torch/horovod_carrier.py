"""Horovod as the carrier of a session: collectives, process sets, and stock Horovod's exchange."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import split_list
from horovod.torch.optimizer import _DistributedOptimizer

from dgc_horovod import envvars, leaving
from dgc_horovod.core.bucketing import HOST_SPEED, NCCL_SPEED
from dgc_horovod.core.nodes import LAST_STEP_SECONDS, Launched, declare, declared, meet_at_exit
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.exchange.contract import BETWEEN, INSIDE
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.state import checkpoint
from dgc_horovod.torch.gradients.collectives import UNSCALED, Collectives, Parameter, Pending, ReduceSettings, Scales
from dgc_horovod.torch.session.carrier import Carrier
from dgc_horovod.torch.session.records import Result
from dgc_horovod.torch.session.session import Session

WITHOUT_CUDA = (
    "Horovod was built without CUDA, and ends a process that passes it a CUDA tensor. All gradients of this optimizer "
    "go through host memory; call broadcast_parameters and Horovod's other operations before the model is on the GPU, "
    "or build Horovod with CUDA (docs/cuda.md)"
)

_ENDED = (
    "Horovod has been shut down: another rank has ended, too early or by an error, which its own output shows "
    "(Horovod's message: {})"
)


def needs_host(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` must not be passed to Horovod, which was built without CUDA and would end the process."""
    return tensor.is_cuda and not hvd.cuda_built()


class _ElasticTimeout(CollectiveTimeout, HorovodInternalError):
    """A timeout of an elastic job, after which the remaining ranks return to the last commit."""


class HorovodCollectives(Collectives):
    """`Collectives` over Horovod.

    Args:
        process_set: Horovod's process set; N is its size.
        tag, timeout: see `Collectives`.
    """

    failures = (HorovodInternalError,)

    def __init__(self, process_set: hvd.ProcessSet, tag: str, timeout: float | None = None) -> None:
        super().__init__(process_set.rank(), process_set.size(), tag, timeout)
        self.process_set = process_set

    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        return self._begun_by(hvd.allgather_async, packet, name)

    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        return self._begun_by(hvd.alltoall_async, tensor, name)

    def allreduce(self, tensor: torch.Tensor, name: str, averages: bool = False, scales: Scales = UNSCALED) -> Pending:
        op = hvd.Average if averages else hvd.Sum
        factors = {"prescale_factor": scales[0], "postscale_factor": scales[1]}
        return self._begun_by(hvd.allreduce_async_, tensor, name, op=op, **factors)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        ranks = list(self.process_set.ranks or range(self.workers))  # global ranks of the set
        return self._begun_by(hvd.broadcast_async_, tensor, name, root_rank=ranks[root])

    def stages(self, tensor: torch.Tensor) -> bool:
        return needs_host(tensor)

    def _begun_by(self, operation: Callable[..., int], tensor: torch.Tensor, name: str, **settings: object) -> Pending:
        """Begin a collective of Horovod.

        Raises:
            HorovodInternalError: another rank has ended. Horovod itself raises it for the set of all ranks only.
        """

        def start(sent: torch.Tensor, full_name: str) -> tuple[int, torch.Tensor]:
            try:
                return operation(sent, name=full_name, process_set=self.process_set, **settings), sent
            except ValueError as error:
                if "Process set provided does not exist" not in str(error):
                    raise
                raise HorovodInternalError(_ENDED.format(error)) from error

        return self._begun(tensor, name, start)

    def _is_done(self, handle: int) -> bool:
        return bool(hvd.poll(handle))

    def _result(self, pending: Pending) -> torch.Tensor:
        result = hvd.synchronize(pending.handle)
        return result[0] if isinstance(result, tuple) else result  # an alltoall also returns the received sizes

    def _timed_out(self, text: str) -> CollectiveTimeout:
        if envvars.horovod_elastic():
            return _ElasticTimeout(text)
        leaving.without_others(hvd)
        return CollectiveTimeout(text)


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

    stock = "stock Horovod"

    def __init__(self, optimizer: _DistributedOptimizer) -> None:
        settings = ReduceSettings(
            optimizer.op == hvd.Average, optimizer.gradient_predivide_factor, optimizer.sparse_as_dense
        )
        number, passes = optimizer.process_set.process_set_id, optimizer.backward_passes_per_step
        super().__init__(optimizer._parameter_names, settings, f"process set {number}", number, passes)
        self.process_set, self._groups = optimizer.process_set, optimizer._groups
        self._optimizer: Any = weakref.proxy(optimizer)  # it owns the session

    def collectives(self, tag: str) -> Collectives:
        return HorovodCollectives(self.process_set, tag)

    def patient(self) -> Collectives:
        return HorovodCollectives(self.process_set, checkpoint.CALLS, envvars.checkpoint_seconds())

    def launched(self) -> Launched:
        return Launched.of(hvd)

    def speed(self, session: Session) -> float:
        on_gpus = hvd.nccl_built() and all(p.is_cuda for p in session.parameters.values())
        return NCCL_SPEED if on_gpus else HOST_SPEED

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
        handle, context = _DistributedOptimizer._allreduce_grad_async(self._optimizer, p)
        return partial(self._taken, p, handle, context)

    def _taken(self, p: Parameter, handle: int | Callable[[], torch.Tensor], context: object) -> torch.Tensor:
        """Wait for an allreduce with a deadline; Horovod's own wait for a stopped rank never ends."""
        if callable(handle):
            result = handle()
        else:
            pending = Pending(handle, p, f"allreduce.{self.names[p]}")
            result = self._optimizer._dgc.exchange.collectives.wait(pending)
        return self._optimizer._compression.decompress(result, context)
