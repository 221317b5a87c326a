"""Horovod's collectives with a deadline, a byte count, and a short cut for a single process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from dgc_horovod import envvars
from dgc_horovod.config_check import cut
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.notices import timed_out
from dgc_horovod.stats import Traffic

_FIRST_PAUSE, _LONGEST_PAUSE = 5e-5, 1e-3  # seconds between two polls; Horovod's own cycle is 1 ms


@dataclass(frozen=True)
class Pending:
    """A collective under way.

    Args:
        handle: Horovod's; None where there was nobody to talk to.
        result: what comes of it, where there is no handle.
        name: its full name.
        home: the tensor that gets the result, if a copy on the host was sent.
    """

    handle: int | None
    result: torch.Tensor
    name: str
    home: torch.Tensor | None = None


WITHOUT_CUDA = (
    "Horovod was built without CUDA, and ends the process that gives it a CUDA tensor. All gradients of this optimizer "
    "go through host memory; call broadcast_parameters and Horovod's other operations before the model is on the GPU, "
    "or build Horovod with CUDA (docs/cuda.md)"
)


def needs_host(tensor: torch.Tensor) -> bool:
    """Whether `tensor` must not be given to Horovod: one that was built without CUDA ends the process then."""
    return tensor.is_cuda and not hvd.cuda_built()


def _sendable(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What Horovod is given for `tensor`, and `Pending.home`."""
    return (tensor.cpu(), tensor) if needs_host(tensor) else (tensor, None)


class _ElasticTimeout(CollectiveTimeout, HorovodInternalError):
    """In an elastic job those who are left go back to the last commit."""


class Collectives:
    """The exchanges of one optimizer on one process set.

    Args:
        process_set: Horovod's; N is its size.
        tag: prefix of every name; names are fixed over the run, so that Horovod's cache always hits.
        timeout: seconds that are waited for the others; None: DGC_TIMEOUT.
    """

    def __init__(self, process_set: hvd.ProcessSet, tag: str, timeout: float | None = None) -> None:
        self.process_set, self.tag = process_set, tag
        self.workers: int = process_set.size()
        self.rank: int = process_set.rank()
        self.traffic = Traffic()
        self._timeout = timeout or envvars.timeout_seconds()

    @property
    def _ranks(self) -> list[int]:
        """The ranks of the set, as Horovod numbers all."""
        return list(self.process_set.ranks or range(self.workers))

    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        """Start an allgather of vectors; the result holds them in rank order."""
        full_name = f"dgc.{self.tag}.{name}"
        if self.workers == 1:
            return Pending(None, packet, full_name)
        return Pending(hvd.allgather_async(packet, name=full_name, process_set=self.process_set), packet, full_name)

    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        """Start an exchange of N equal parts of a vector; the result holds what came, in rank order."""
        full_name = f"dgc.{self.tag}.{name}"
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        return Pending(hvd.alltoall_async(tensor, None, full_name, self.process_set), tensor, full_name)

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """The `data` of every rank, of any length, in rank order. Blocks; two collectives."""
        own = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        lengths = torch.tensor([len(data)], dtype=torch.int64)
        sizes = self.wait(self.allgather(lengths, f"{name}.lengths")).tolist()
        return cut(self.wait(self.allgather(own, name)).numpy().tobytes(), sizes)

    def allreduce(
        self, tensor: torch.Tensor, name: str, op: int = hvd.Sum, prescale: float = 1.0, postscale: float = 1.0
    ) -> Pending:
        """Start an allreduce in place."""
        full_name = f"dgc.{self.tag}.{name}"
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = _sendable(tensor)
        handle = hvd.allreduce_async_(
            sent,
            name=full_name,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=self.process_set,
        )
        return Pending(handle, sent, full_name, home)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        """Start a broadcast, in place, from rank `root` of the set."""
        full_name = f"dgc.{self.tag}.{name}"
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = _sendable(tensor)
        handle = hvd.broadcast_async_(sent, self._ranks[root], full_name, self.process_set)
        return Pending(handle, sent, full_name, home)

    def done(self, pending: Pending) -> bool:
        """Whether `wait` would return at once."""
        return pending.handle is None or bool(hvd.poll(pending.handle))

    def wait(self, pending: Pending) -> torch.Tensor:
        """The result of a collective.

        Raises:
            CollectiveTimeout: it did not finish within DGC_TIMEOUT seconds.
        """
        if pending.handle is None:
            return pending.result
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        with self.traffic.timing("waiting"):
            while not hvd.poll(pending.handle):
                if time.monotonic() > deadline:
                    kind = _ElasticTimeout if envvars.horovod_elastic() else CollectiveTimeout
                    raise kind(timed_out(self.rank, self.workers, pending.name, self._timeout))
                time.sleep(pause)
                pause = min(1.1 * pause, _LONGEST_PAUSE)  # a tenth of what it has waited
            result = hvd.synchronize(pending.handle)
        if isinstance(result, tuple):  # an alltoall says how much came from whom
            result = result[0]
        return result if pending.home is None else pending.home.copy_(result)
