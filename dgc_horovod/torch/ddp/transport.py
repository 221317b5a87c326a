"""The collectives of torch.distributed, on host memory, in a process group of our own."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from dgc_horovod.config_check import cut
from dgc_horovod.errors import CollectiveTimeout, DGCError, LostRank
from dgc_horovod.notices import lost, timed_out
from dgc_horovod.torch.gradients.collectives import Collectives, Pending

_allgather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class _Started(NamedTuple):
    """A collective under way: its name, torch's handle, the tensor that gets the result, a factor that is to come."""

    name: str
    work: Any
    result: torch.Tensor
    factor: float


def new_group(ranks: Sequence[int], seconds: float, by_members: bool = True) -> dist.ProcessGroup:
    """A Gloo group of our own, so that no collective of the script, or of DDP, comes between ours.

    Packets are made on the host and read there, also of a model whose DDP talks over NCCL. Every one of `ranks` must
    call it, in the same order as other groups; the others need not. Of a part of the ranks all must be in equally many
    groups: torch.distributed derives a group's name from that.

    Args:
        ranks: ranks of the group, as torch.distributed numbers all.
        seconds: time in which each collective must end, > 0; a process that ends waits for it too.
        by_members: whether `ranks` alone make the group; False: all ranks of the job do.

    Raises:
        CollectiveTimeout: one of them did not.
    """
    is_part = by_members and len(ranks) < dist.get_world_size()
    timeout = datetime.timedelta(seconds=seconds)
    begin = time.monotonic()
    try:
        return dist.new_group(list(ranks), timeout, "gloo", use_local_synchronization=is_part, group_desc="dgc")
    except RuntimeError as error:  # of torch's store, which knows of keys alone
        raise CollectiveTimeout(
            f"rank {dist.get_rank()} waited {time.monotonic() - begin:.0f} s for register() or save_checkpoint(), "
            "which every rank must call. If all did, they cannot reach each other: set GLOO_SOCKET_IFNAME to the "
            f"network interface that joins the hosts ({error})"
        ) from error


class ProcessGroupCollectives(Collectives):
    """`Collectives` by torch.distributed. Collectives have no names there: all ranks start them in one order.

    Args:
        group: Gloo group, see `new_group`; N is its size.
        tag, timeout: see `Collectives`.
    """

    failures = (LostRank,)
    by_name = False

    def __init__(self, group: dist.ProcessGroup, tag: str, timeout: float | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), tag, timeout)
        self.group = group

    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, packet, full_name)
        gathered = packet.new_empty(self.workers * packet.numel())
        return self._started(_allgather, full_name, gathered, packet, result=gathered)

    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent = tensor.cpu()
        received = torch.empty_like(sent)
        home = tensor if tensor.is_cuda else None
        return self._started(dist.all_to_all_single, full_name, received, sent, result=received, home=home)

    def allreduce(
        self, tensor: torch.Tensor, name: str, averages: bool = False, prescale: float = 1.0, postscale: float = 1.0
    ) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = tensor.cpu(), tensor if tensor.is_cuda else None
        if prescale != 1:
            sent.mul_(prescale)
        factor = postscale / self.workers if averages else postscale
        return self._started(dist.all_reduce, full_name, sent, result=sent, home=home, factor=factor)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = tensor.cpu(), tensor if tensor.is_cuda else None
        source = dist.get_global_rank(self.group, root)
        return self._started(dist.broadcast, full_name, sent, source, result=sent, home=home)

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """See `Collectives`: all that is sent is padded to the longest."""
        sizes = self.wait(self.allgather(torch.tensor([len(data)]), f"{name}.lengths")).tolist()
        longest = max(1, *sizes)
        own = np.zeros(longest, np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        found = self.wait(self.allgather(torch.from_numpy(own), name)).numpy().tobytes()
        return [part[:size] for part, size in zip(cut(found, [longest] * len(sizes)), sizes, strict=True)]

    def meet(self, name: str) -> None:
        """Wait until every rank is here, before collectives that a script may call on one rank alone.

        Collectives of different sizes that meet, as they are matched by their order, end a process. Gloo tells those of
        two kinds apart, and a barrier is of a kind that nothing else here is of: whoever is elsewhere waits too.
        """
        if self.workers > 1:
            self.wait(self._started(dist.barrier, self._full_name(name), result=torch.empty(0)))

    def _started(
        self,
        collective: Any,
        name: str,
        *arguments: Any,
        result: torch.Tensor,
        home: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> Pending:
        try:
            work = collective(*arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._failed(name, error) from error
        return Pending(_Started(name, work, result, factor), result, name, home)

    def _is_done(self, handle: _Started) -> bool:
        return bool(handle.work.is_completed())

    def _result(self, handle: _Started) -> torch.Tensor:
        try:
            handle.work.wait()
        except RuntimeError as error:
            raise self._failed(handle.name, error) from error
        return handle.result if handle.factor == 1 else handle.result.mul_(handle.factor)

    def _failed(self, name: str, error: Exception) -> DGCError:
        """The library's own time limit is ours; everything else means that a connection is gone.

        Gloo has two words for its limit: "timed out" of the collective that waited too long, and "application timeout
        caused pair closure" of every other one that was under way, which may be the one that is asked for first.
        """
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "timed out" in text.lower():
            return self._timed_out(timed_out(self.rank, self.workers, name, self._timeout))
        if "application timeout" in text.lower():
            one = f"{name} or another collective under way"
            return self._timed_out(timed_out(self.rank, self.workers, one, self._timeout))
        return LostRank(lost(self.rank, self.workers, name, text))
