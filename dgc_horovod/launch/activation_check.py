"""Whether every rank of a job compresses: asked once, right after ``hvd.init()``, with a deadline.

A rank without our activation trains as if nothing were; the others would wait for it in collectives that it never
joins. So each rank that is active reports to a store of the launcher, rank 0 counts, and its verdict goes to all.
Without such a store (mpirun, srun) the agreement of the first optimizer takes this place: Horovod's own
stall check names the missing ranks, and DGC_TIMEOUT ends the wait.
"""

from __future__ import annotations

import logging
import random
import socket
import time
from typing import Any

from dgc_horovod import envvars
from dgc_horovod.errors import NotActivated
from dgc_horovod.launch.status_server import StatusBoard
from dgc_horovod.stats import PROCESS

_log = logging.getLogger("dgc_horovod")
SECONDS = 30.0  # hvd.init() has just brought all ranks together, so they are all here or will never be
_MOST_NAMED = 20
_LOOK_EVERY, _LOOK_AT_LEAST_EVERY = 0.05, 1.0


def prepare() -> None:
    """Before ``hvd.init()``: where no store will name the missing ranks, let Horovod do it before our time is over."""
    if not envvars.store_addresses():
        envvars.warn_of_stalls_within(envvars.timeout_seconds() / 2)


def hold(rank: int, workers: int) -> None:
    """Return on every rank if all are active; otherwise raise the same error on each that is.

    Args:
        rank: index of this process, 0 <= rank < workers.
        workers: N >= 1.

    Raises:
        NotActivated: names the missing ranks and their hosts.
    """
    addresses, number = envvars.store_addresses(), PROCESS.next_number("activation check")
    if not addresses:
        return
    board, seconds = StatusBoard(addresses), min(SECONDS, envvars.timeout_seconds())
    try:
        board.put(present(number, rank), socket.gethostname())
        if workers == 1:
            return
        absent = (_count if rank == 0 else _await_verdict)(board, number, workers, seconds)
    except OSError as error:
        _log.warning(
            "dgc_horovod: rank %d cannot reach its launcher at %s (%s); if no rank can, whether all of them compress "
            "is only found out at the first exchange", rank, board.names, error,
        )  # fmt: skip
        return
    if absent:
        raise NotActivated(_message(absent, workers, board.names))


def present(number: int, rank: int) -> str:
    """The key under which a rank reports that it is active."""
    return f"{number}.rank{rank}"


def verdict(number: int) -> str:
    """The key under which rank 0 publishes who is absent."""
    return f"{number}.verdict"


def _count(board: StatusBoard, number: int, workers: int, seconds: float) -> list[int]:
    """Rank 0: wait for all; publish and return who is absent."""
    absent, deadline = list(range(workers)), time.monotonic() + seconds
    while True:
        absent = [rank for rank in absent if board.get(present(number, rank)) is None]
        if not absent or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY)
    board.put(verdict(number), absent[:_MOST_NAMED])
    return absent


def _await_verdict(board: StatusBoard, number: int, workers: int, seconds: float) -> list[int]:
    """Every other rank: what rank 0 says; if it says nothing, whom this rank cannot see."""
    deadline, pause = time.monotonic() + seconds + 5 * _LOOK_AT_LEAST_EVERY, _LOOK_EVERY
    while time.monotonic() < deadline:
        absent: Any = board.get(verdict(number))
        if isinstance(absent, list) and all(isinstance(rank, int) for rank in absent):
            return absent
        time.sleep(pause * random.uniform(0.5, 1))  # not all at once
        pause = min(1.5 * pause, _LOOK_AT_LEAST_EVERY)
    return [rank for rank in range(workers) if board.get(present(number, rank)) is None]


def _message(absent: list[int], workers: int, names: str) -> str:
    from dgc_horovod.launch.hosts import host_of_rank  # Horovod's hosts; a job of torch comes to this module without it

    slots = envvars.value(envvars.HOSTS) or ""
    named = []
    for rank in absent[:_MOST_NAMED]:
        host = host_of_rank(slots, rank, workers)
        named.append(f"rank {rank}{f' ({host})' if host else ''}")
    more = " and more" if len(absent) >= _MOST_NAMED else ""
    return (
        f"compression is not active on {', '.join(named)}{more} of {workers} ranks, so every rank stops: the Python "
        "there did not run dgc_horovod's sitecustomize before it imported Horovod. Usual reasons: a wrapper script "
        "resets PYTHONPATH, python runs with -I, -E or -S, DGC_ENABLED=0 is set there, or another Python is used; or "
        f"that rank cannot reach {names}"
    )
