"""Named collectives of torch tensors with a deadline and a byte count; who carries them is left to a subclass."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

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
        handle: handle of the transport; None where there was nobody to talk to.
        result: result of the collective, where there is no handle.
        name: full name of the collective.
        home: tensor that gets the result, if a copy on the host was sent; else None.
    """

    handle: Any
    result: torch.Tensor
    name: str
    home: torch.Tensor | None = None


class Collectives(ABC):
    """`contract.Transport` for one optimizer: the collectives of one group of workers.

    Args:
        rank: index of this worker in the group, 0 <= rank < workers.
        workers: N >= 1; where it is 1 nothing is sent.
        tag: prefix of every name; names are fixed over the run, so that caches of them always hit.
        timeout: seconds to wait for the others, > 0; None: DGC_TIMEOUT.
    """

    failures: tuple[type[Exception], ...] = ()  # what a collective raises once another rank has ended
    # Whether those of all ranks meet by name, in whatever order a rank starts them, and small ones are put together. If
    # not, every rank must start the same ones in the same order.
    by_name = True

    def __init__(self, rank: int, workers: int, tag: str, timeout: float | None = None) -> None:
        self.rank, self.workers, self.tag = rank, workers, tag
        self.traffic = Traffic()
        self._timeout = timeout or envvars.timeout_seconds()

    @abstractmethod
    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        """Start an allgather of vectors; the result holds them in rank order."""

    @abstractmethod
    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        """Start an exchange of N equal parts of a vector; the result holds what came, in rank order."""

    @abstractmethod
    def allreduce(
        self, tensor: torch.Tensor, name: str, averages: bool = False, prescale: float = 1.0, postscale: float = 1.0
    ) -> Pending:
        """Start a sum or mean over ranks of ``prescale * tensor``, times `postscale`; in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        """Start a broadcast, in place, from rank `root` of the group."""

    @abstractmethod
    def _is_done(self, handle: Any) -> bool:
        """Whether `_result` would return at once."""

    @abstractmethod
    def _result(self, handle: Any) -> torch.Tensor:
        """What has come of a collective that is done."""

    def _timed_out(self, text: str) -> CollectiveTimeout:
        return CollectiveTimeout(text)

    def _full_name(self, name: str) -> str:
        return f"dgc.{self.tag}.{name}"

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """The `data` of every rank, of any length, in rank order. Blocks; two collectives."""
        own = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        lengths = torch.tensor([len(data)], dtype=torch.int64)
        sizes = self.wait(self.allgather(lengths, f"{name}.lengths")).tolist()
        return cut(self.wait(self.allgather(own, name)).numpy().tobytes(), sizes)

    def done(self, pending: Pending) -> bool:
        """Whether `wait` would return at once."""
        return pending.handle is None or self._is_done(pending.handle)

    def wait(self, pending: Pending) -> torch.Tensor:
        """The result of a collective.

        Raises:
            CollectiveTimeout: it did not finish within DGC_TIMEOUT seconds.
        """
        if pending.handle is None:
            return pending.result
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        with self.traffic.timing("waiting"):
            while not self._is_done(pending.handle):
                if time.monotonic() > deadline:
                    raise self._timed_out(timed_out(self.rank, self.workers, pending.name, self._timeout))
                time.sleep(pause)
                pause = min(1.1 * pause, _LONGEST_PAUSE)  # a tenth of what it has waited
            result = self._result(pending.handle)
        return result if pending.home is None else pending.home.copy_(result)
