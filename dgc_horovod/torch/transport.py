"""Horovod's collectives of torch tensors, on one process set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from dgc_horovod import envvars, leaving
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.torch.gradients.collectives import Collectives, Pending

WITHOUT_CUDA = (
    "Horovod was built without CUDA, and ends the process that gives it a CUDA tensor. All gradients of this optimizer "
    "go through host memory; call broadcast_parameters and Horovod's other operations before the model is on the GPU, "
    "or build Horovod with CUDA (docs/cuda.md)"
)

_ENDED = (
    "Horovod has been shut down: another rank has ended, too early or by an error that its own output tells "
    "(Horovod says: {})"
)


def needs_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` must not be given to Horovod: one that was built without CUDA ends the process then."""
    return tensor.is_cuda and not hvd.cuda_built()


def _sendable(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What Horovod is given for `tensor`, and `Pending.home`."""
    return (tensor.cpu(), tensor) if needs_host(tensor) else (tensor, None)


class _ElasticTimeout(CollectiveTimeout, HorovodInternalError):
    """In an elastic job those who are left go back to the last commit."""


class HorovodCollectives(Collectives):
    """`Collectives` by Horovod.

    Args:
        process_set: Horovod's process set; N is its size.
        tag, timeout: see `Collectives`.
    """

    failures = (HorovodInternalError,)

    def __init__(self, process_set: hvd.ProcessSet, tag: str, timeout: float | None = None) -> None:
        super().__init__(process_set.rank(), process_set.size(), tag, timeout)
        self.process_set = process_set

    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, packet, full_name)
        handle = self._start(hvd.allgather_async, packet, name=full_name, process_set=self.process_set)
        return Pending(handle, packet, full_name)

    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = _sendable(tensor)
        handle = self._start(hvd.alltoall_async, sent, None, full_name, self.process_set)
        return Pending(handle, sent, full_name, home)

    def allreduce(
        self, tensor: torch.Tensor, name: str, averages: bool = False, prescale: float = 1.0, postscale: float = 1.0
    ) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = _sendable(tensor)
        handle = self._start(
            hvd.allreduce_async_,
            sent,
            name=full_name,
            op=hvd.Average if averages else hvd.Sum,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self.process_set,
        )
        return Pending(handle, sent, full_name, home)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = _sendable(tensor)
        ranks = list(self.process_set.ranks or range(self.workers))  # of the set, as Horovod numbers all
        handle = self._start(hvd.broadcast_async_, sent, ranks[root], full_name, self.process_set)
        return Pending(handle, sent, full_name, home)

    def _start(self, operation: Callable[..., int], *arguments: Any, **settings: Any) -> int:
        """Horovod's handle of a collective that is under way.

        Raises:
            HorovodInternalError: another rank has ended. Of the set of all ranks Horovod says so itself.
        """
        try:
            return operation(*arguments, **settings)
        except ValueError as error:
            if "Process set provided does not exist" not in str(error):
                raise
            raise HorovodInternalError(_ENDED.format(error)) from error

    def _is_done(self, handle: int) -> bool:
        return bool(hvd.poll(handle))

    def _result(self, handle: int) -> torch.Tensor:
        result = hvd.synchronize(handle)
        return result[0] if isinstance(result, tuple) else result  # an alltoall says how much came from whom

    def _timed_out(self, text: str) -> CollectiveTimeout:
        if envvars.horovod_elastic():
            return _ElasticTimeout(text)
        leaving.without_others(hvd)
        return CollectiveTimeout(text)
