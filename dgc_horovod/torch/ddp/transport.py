"""Collectives of torch.distributed on host memory, in a process group of our own."""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from dgc_horovod import envvars, leaving
from dgc_horovod.errors import CollectiveTimeout, DGCError, LostRank
from dgc_horovod.notices import lost, timed_out
from dgc_horovod.torch.gradients.collectives import UNSCALED, Collectives, Pending, Scales, Start

_PAUSE = 0.01  # seconds between two polls of the store


class Group(NamedTuple):
    """Connections of our own between some ranks, which are closed when there is no reference to them.

    Args:
        ranks: global ranks, in ascending order.
        rank: index of this rank in `ranks`.
        gloo: torch's Gloo backend; None with one rank.
    """

    ranks: list[int]
    rank: int
    gloo: Any


def new_group(ranks: Sequence[int], seconds: float, connecting: float | None = None) -> Group:
    """Connect `ranks`, each of which calls this, in a group apart from the collectives of the script and of DDP.

    Packets are in host memory, also for a model whose DDP uses NCCL. The group is not registered in torch.distributed,
    which names new groups by the number of its groups, so that every rank would have to close ours at the same moment.

    Args:
        ranks: global ranks of the group.
        seconds: time to wait for all ranks, and limit of each collective, > 0; a process that ends may wait as long.
        connecting: time to connect after all ranks are there, > 0; None: DGC_TIMEOUT.

    Raises:
        CollectiveTimeout: a rank did not come, or cannot be reached.
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
    except (RuntimeError, TimeoutError) as error:  # raised by torch's store; its text names only keys
        raise CollectiveTimeout(
            f"rank {own} waited {time.monotonic() - begin:.0f} s for register() or save_checkpoint(), "
            "which every rank must call. If all did, they cannot reach each other: set GLOO_SOCKET_IFNAME to the "
            f"network interface that joins the hosts ({error})"
        ) from error


def _agreed_name(store: dist.Store, own: int, members: list[int], deadline: float) -> str:
    """Agree on a new name for the group, the same on every member.

    After a restart by torchrun processes get the store of the processes before, and Gloo would connect to the addresses
    of dead ones. So each member draws a random text, and the first member answers with a name and all texts that it has
    read. A member accepts an answer with its own text, and confirms it; the first answers until all have confirmed.
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
    """Call `connect` in a thread with a time limit: Gloo may exceed its own limit if an address refuses connections.

    Raises:
        TimeoutError: it has not returned in time.
    """
    connected: Future[Any] = Future()

    def call() -> None:
        try:
            connected.set_result(connect(*arguments))
        except Exception as error:
            connected.set_exception(error)

    if not leaving.within(seconds, call):
        raise TimeoutError(f"no connection to every rank within {seconds:g} s")
    return connected.result()


class ProcessGroupCollectives(Collectives):
    """`Collectives` over torch.distributed, which has no names of collectives: all ranks start them in one order.

    Args:
        group: see `new_group`; N is its size.
        tag, timeout: see `Collectives`.
    """

    failures = (LostRank,)
    by_name, pads = False, True

    def __init__(self, group: Group, tag: str, timeout: float | None = None) -> None:
        super().__init__(group.rank, len(group.ranks), tag, timeout)
        self.group, self._gloo = group, group.gloo

    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        def start(sent: torch.Tensor, full_name: str) -> tuple[Any, torch.Tensor]:
            # pinned memory, which is allocated once, if a device has written the packet: it reads the result there
            gathered = torch.empty(self.workers * sent.numel(), dtype=sent.dtype, pin_memory=sent.is_pinned())
            return self._gloo._allgather_base(gathered, sent), gathered

        return self._begun(packet, name, start)

    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        def start(sent: torch.Tensor, full_name: str) -> tuple[Any, torch.Tensor]:
            received = torch.empty_like(sent)
            return self._gloo.alltoall_base(received, sent, [], []), received

        return self._begun(tensor, name, start)

    def allreduce(self, tensor: torch.Tensor, name: str, averages: bool = False, scales: Scales = UNSCALED) -> Pending:
        before, after = scales

        def start(sent: torch.Tensor, full_name: str) -> tuple[Any, torch.Tensor]:
            return self._gloo.allreduce([sent if before == 1 else sent.mul_(before)]), sent

        return self._begun(tensor, name, start, after / self.workers if averages else after)

    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        return self._begun(tensor, name, lambda sent, full_name: (self._gloo.broadcast(sent, root), sent))

    def stages(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def meet(self, name: str) -> None:
        """See `Collectives`: two collectives of different sizes would end a process. Gloo distinguishes kinds, and
        barriers are used only here: a rank that is elsewhere waits too, until the timeout.
        """
        self.wait(self._begun(torch.empty(0), name, lambda nothing, full_name: (self._gloo.barrier(), nothing)))

    def _begun(self, tensor: torch.Tensor, name: str, start: Start, factor: float = 1.0) -> Pending:
        def started(sent: torch.Tensor, full_name: str) -> tuple[Any, torch.Tensor]:
            with self._failing(full_name):
                return start(sent, full_name)

        return super()._begun(tensor, name, started, factor)

    def _is_done(self, handle: Any) -> bool:
        return bool(handle.is_completed())

    def _result(self, pending: Pending) -> torch.Tensor:
        with self._failing(pending.name):
            pending.handle.wait()
        return pending.result

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Raise `_failed` for an error of Gloo inside."""
        try:
            yield
        except RuntimeError as error:
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: Exception) -> DGCError:
        """Return a timeout error for Gloo's time limit, which is ours, else LostRank: the connection is lost.

        Gloo reports its limit as "timed out" for the collective that waited too long, and as "application timeout
        caused pair closure" for all others under way, which may be waited for first.
        """
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "timed out" not in text.lower():
            if "application timeout" not in text.lower():
                return LostRank(lost(self.rank, self.workers, name, text))
            name = f"{name} or another collective under way"
        return self._timed_out(timed_out(self.rank, self.workers, name, self._timeout))
