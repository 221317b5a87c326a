"""Horovod's collectives of torch tensors, on one process set."""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from dgc_horovod import envvars, leaving
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.torch.gradients.collectives import UNSCALED, Collectives, Pending, Scales

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
        def start(sent: torch.Tensor, full_name: str) -> tuple[int, torch.Tensor]:
            return self._start(operation, sent, name=full_name, process_set=self.process_set, **settings), sent

        return self._begun(tensor, name, start)

    def _start(self, operation: Callable[..., int], *arguments: object, **settings: object) -> int:
        """Start a collective; return Horovod's handle.

        Raises:
            HorovodInternalError: another rank has ended. Horovod itself raises it for the set of all ranks only.
        """
        try:
            return operation(*arguments, **settings)
        except ValueError as error:
            if "Process set provided does not exist" not in str(error):
                raise
            raise HorovodInternalError(_ENDED.format(error)) from error

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
