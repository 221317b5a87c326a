"""The collectives of torch.distributed, on host memory, in a process group of our own."""

from __future__ import annotations

import datetime
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dgc_horovod import envvars
from dgc_horovod.config_check import cut
from dgc_horovod.errors import CollectiveTimeout, DGCError, LostRank
from dgc_horovod.notices import lost, timed_out
from dgc_horovod.torch.gradients.collectives import Collectives, Pending

_PAUSE = 0.01  # seconds between two looks into the store


class _Started(NamedTuple):
    """A collective under way: its name, torch's handle, the tensor that gets the result, a factor that is to come."""

    name: str
    work: Any
    result: torch.Tensor
    factor: float


class Group(NamedTuple):
    """Connections of our own between some ranks, which end when nothing refers to them any more.

    Args:
        ranks: its ranks, as torch.distributed numbers all, in ascending order.
        rank: index of this one among them.
        gloo: torch's Gloo backend; None where there is nobody to talk to.
    """

    ranks: list[int]
    rank: int
    gloo: Any


def new_group(ranks: Sequence[int], seconds: float, connecting: float | None = None) -> Group:
    """Connect `ranks`, each of which calls this, so that no collective of the script, or of DDP, comes between ours.

    Packets are made on the host and read there, also of a model whose DDP talks over NCCL. torch.distributed does not
    know of the group: it counts those that it knows, and names others by their number, so that every rank would have to
    end ours at the same moment.

    Args:
        ranks: ranks of the group, as torch.distributed numbers all.
        seconds: time to wait for all of them, and in which each collective must end, > 0; a process that ends waits for
            it too.
        connecting: time that they have to connect, from when all are there, > 0; None: DGC_TIMEOUT.

    Raises:
        CollectiveTimeout: one of them did not come, or cannot be reached.
    """
    members, own = sorted(ranks), dist.get_rank()
    if len(members) == 1:
        return Group(members, 0, None)
    begin = time.monotonic()
    try:
        shared = dist.PrefixStore(f"dgc/{','.join(map(str, members))}", _get_default_store())
        name = _agreed_name(shared, own, members, begin + seconds)
        limit = datetime.timedelta(seconds=seconds)
        arguments = dist.PrefixStore(name, shared), members.index(own), len(members), limit
        gloo = _within(connecting or envvars.timeout_seconds(), dist.ProcessGroupGloo, *arguments)
        return Group(members, members.index(own), gloo)
    except (RuntimeError, TimeoutError) as error:  # of torch's store, which knows of keys alone
        raise CollectiveTimeout(
            f"rank {own} waited {time.monotonic() - begin:.0f} s for register() or save_checkpoint(), "
            "which every rank must call. If all did, they cannot reach each other: set GLOO_SOCKET_IFNAME to the "
            f"network interface that joins the hosts ({error})"
        ) from error


def _agreed_name(store: dist.Store, own: int, members: list[int], deadline: float) -> str:
    """A name that no group has had before, the same on every member.

    torchrun gives the processes that it starts again the store of those before, and Gloo would connect to the addresses
    that dead ones have written there. So the first member answers what the others have drawn by a name. A rank takes
    an answer that holds what it has drawn itself, and says so; the first one answers until all have done so.
    """
    drawn = uuid.uuid4().hex
    if own == members[0]:
        while (found := [_read(store, str(rank), deadline) for rank in members[1:]]) != [drawn] * len(found):
            store.set("answer", " ".join([drawn, *found]))
            time.sleep(_PAUSE)
        return drawn
    store.set(str(own), drawn)
    while drawn not in (answer := _read(store, "answer", deadline).split())[1:]:
        time.sleep(_PAUSE)
    store.set(str(own), answer[0])
    return answer[0]


def _read(store: dist.Store, key: str, deadline: float) -> str:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"{key!r} in the store is still that of an earlier call")
    store.wait([key], datetime.timedelta(seconds=left))
    return str(store.get(key).decode())


def _within(seconds: float, connect: Callable[..., Any], *arguments: Any) -> Any:
    """What `connect` returns; in a thread, as Gloo may try on beyond its own limit where an address refuses.

    Raises:
        TimeoutError: it has not returned.
    """
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            done.put((connect(*arguments), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=call, name="dgc-connect", daemon=True).start()
    try:
        found, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no connection to every rank within {seconds:g} s") from None
    if error is not None:
        raise error
    return found


class ProcessGroupCollectives(Collectives):
    """`Collectives` by torch.distributed. Collectives have no names there: all ranks start them in one order.

    Args:
        group: see `new_group`; N is its size.
        tag, timeout: see `Collectives`.
    """

    failures = (LostRank,)
    by_name = False

    def __init__(self, group: Group, tag: str, timeout: float | None = None) -> None:
        super().__init__(group.rank, len(group.ranks), tag, timeout)
        self.group, self._gloo = group, group.gloo

    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, packet, full_name)
        gathered = packet.new_empty(self.workers * packet.numel())
        return self._started("_allgather_base", full_name, gathered, packet, result=gathered)

    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent = tensor.cpu()
        received = torch.empty_like(sent)
        home = tensor if tensor.is_cuda else None
        return self._started("alltoall_base", full_name, received, sent, [], [], result=received, home=home)

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
        return self._started("allreduce", full_name, [sent], result=sent, home=home, factor=factor)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        full_name = self._full_name(name)
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = tensor.cpu(), tensor if tensor.is_cuda else None
        return self._started("broadcast", full_name, sent, root, result=sent, home=home)

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
            self.wait(self._started("barrier", self._full_name(name), result=torch.empty(0)))

    def _started(
        self,
        collective: str,
        name: str,
        *arguments: Any,
        result: torch.Tensor,
        home: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> Pending:
        try:
            work = getattr(self._gloo, collective)(*arguments)
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
