"""Whether every rank of a job compresses: asked once, right after ``hvd.init()``, with a deadline.

A rank without our activation trains as if nothing were; the others would wait for it in collectives that it never
joins. So each rank that is active reports to a store of the launcher, rank 0 counts, and its verdict goes to all.
Without such a store (mpirun, srun) the agreement of the first optimizer takes this place: Horovod's own
stall check names the missing ranks, and DGC_TIMEOUT ends the wait.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from dgc_horovod import envvars
from dgc_horovod.errors import NotActivated
from dgc_horovod.launch.desk import ACTIVE, Desk
from dgc_horovod.launch.hosts import host_of_rank

_log = logging.getLogger("dgc_horovod")
SECONDS = 30.0  # hvd.init() has just brought all ranks together, so they are all here or will never be
_LOOK_EVERY = 0.1


def prepare() -> None:
    """Before ``hvd.init()``: where no store will name the missing ranks, let Horovod do it before our time is over."""
    if not envvars.store_addresses():
        envvars.warn_of_stalls_within(envvars.timeout_seconds() / 2)


def hold(rank: int, workers: int, number: int = 0) -> None:
    """Return on every rank if all are active; otherwise raise the same error on each that is.

    Args:
        rank: of this process.
        workers: N.
        number: how many roll-calls there were before.

    Raises:
        NotActivated: names the missing ranks and their hosts.
    """
    addresses = envvars.store_addresses()
    if workers == 1 or not addresses:
        return
    desk, seconds = Desk(addresses[0]), min(SECONDS, envvars.timeout_seconds())
    try:
        desk.put(f"{number}.rank{rank}", socket.gethostname())
        absent = _count(desk, number, workers, seconds) if rank == 0 else _verdict(desk, number, workers, seconds)
    except OSError as error:
        _log.warning(
            "dgc_horovod: rank %d cannot reach its launcher at %s (%s); whether every rank compresses is only found "
            "out at the first exchange", rank, addresses[0].split("@")[-1], error,
        )  # fmt: skip
        return
    if absent:
        raise NotActivated(_message(absent, workers))


def tell_launcher() -> None:
    """Let `dgcrun` know that compression came alive; it matters only where a script never imports Horovod."""
    address = envvars.DESK.read()
    if address:
        try:
            Desk(address).put(ACTIVE, True)
        except OSError as error:
            _log.warning("dgc_horovod: dgcrun cannot be reached at %s (%s)", address.split("@")[-1], error)


def _count(desk: Desk, number: int, workers: int, seconds: float) -> list[int]:
    """Rank 0: wait for all; publish and return who is absent."""
    absent, deadline = list(range(workers)), time.monotonic() + seconds
    while True:
        absent = [rank for rank in absent if desk.get(f"{number}.rank{rank}") is None]
        if not absent or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY)
    desk.put(f"{number}.verdict", absent)
    return absent


def _verdict(desk: Desk, number: int, workers: int, seconds: float) -> list[int]:
    """Every other rank: what rank 0 says; if it says nothing, whom this rank cannot see."""
    deadline = time.monotonic() + seconds + 10 * _LOOK_EVERY
    while time.monotonic() < deadline:
        absent: Any = desk.get(f"{number}.verdict")
        if absent is not None:
            return [int(rank) for rank in absent]
        time.sleep(_LOOK_EVERY)
    return [rank for rank in range(workers) if desk.get(f"{number}.rank{rank}") is None]


def _message(absent: list[int], workers: int) -> str:
    slots = envvars.HOSTS.read()
    named = []
    for rank in absent[:20]:
        host = host_of_rank(slots, rank, workers)
        named.append(f"rank {rank}{f' ({host})' if host else ''}")
    more = f" and {len(absent) - 20} more" if len(absent) > 20 else ""
    return (
        f"compression is not active on {', '.join(named)}{more} of {workers} ranks, so every rank stops: the Python "
        "there did not run dgc_horovod's sitecustomize before it imported Horovod. Usual reasons: a wrapper script "
        "resets PYTHONPATH, python runs with -I, -E or -S, DGC_ENABLED=0 is set there, or another Python is used"
    )
