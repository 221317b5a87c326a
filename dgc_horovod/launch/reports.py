"""What a rank tells its launcher: right after ``hvd.init()`` that it compresses, and while the job runs its figures.

A rank without our activation trains as if nothing were; the others would wait for it in collectives that it never
joins. So each rank that is active reports to a store of the launcher, rank 0 counts, and its verdict goes to all.
Without such a store (mpirun, srun) the agreement of the first optimizer takes this place: Horovod's own
stall check names the missing ranks, and DGC_TIMEOUT ends the wait.

Then a thread of each rank reports how long it waits for the others, and so on, to `dgcrun`, and a thread of rank 0
reads what all have reported. No collective, no graph and no step of the training knows of it: a rank that is slow, or
stuck in a collective, reports like any other.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from typing import Any

from dgc_horovod import advice, envvars, leaving
from dgc_horovod.errors import NotActivated
from dgc_horovod.launch.status_server import StatusBoard
from dgc_horovod.recording import EVERY, rank_figures
from dgc_horovod.stats import COUNTERS, PROCESS, is_figure

_log = logging.getLogger("dgc_horovod")
CHECK_SECONDS = 30.0  # hvd.init() has just brought all ranks together, so they are all here or will never be
_MOST_NAMED = 20
_LOOK_EVERY, _LOOK_AT_LEAST_EVERY = 0.05, 1.0
PREFIX = "figures."
_MOST_A_SECOND = 20  # reports of all ranks together
_LAST_SECONDS = 2.0  # that rank 0 waits for the last reports of the others


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
    board, seconds = StatusBoard(addresses), min(CHECK_SECONDS, envvars.timeout_seconds())
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

    hosts = host_of_rank(envvars.value(envvars.HOSTS) or "", workers)
    named = [f"rank {rank} ({hosts[rank]})" if rank in hosts else f"rank {rank}" for rank in absent[:_MOST_NAMED]]
    more = " and more" if len(absent) >= _MOST_NAMED else ""
    return (
        f"compression is not active on {', '.join(named)}{more} of {workers} ranks, so every rank stops: the Python "
        "there did not run dgc_horovod's sitecustomize before it imported Horovod. Usual reasons: a wrapper script "
        "resets PYTHONPATH, python runs with -I, -E or -S, DGC_ENABLED=0 is set there, or another Python is used; or "
        f"that rank cannot reach {names}"
    )


def interval(workers: int) -> float:
    """Seconds from one report of a rank to its next."""
    return max(EVERY, workers / _MOST_A_SECOND)


def figures_of(rank: int) -> str:
    """The key under which a rank reports its figures."""
    return f"{PREFIX}{rank}"


def sound(entry: Any, rank: int) -> dict[str, Any] | None:
    """The report of a rank, as `Reports` makes them; None if an entry is no such thing.

    Whoever has the job's key can put anything there: of what is no report nothing may come but that it is left out.

    Args:
        entry: JSON that was found under `figures_of(rank)`.
        rank: index of the rank.
    """
    if not isinstance(entry, dict) or entry.get("rank") != rank:
        return None
    host, counts = entry.get("host"), [entry.get(name) for name in COUNTERS]
    if not all(is_figure(count) and count >= 0 for count in counts):
        return None
    more = {name: value for name, value in entry.items() if name.isidentifier() and name.isascii() and is_figure(value)}
    named = host if isinstance(host, str) and host.isprintable() else ""
    return {**more, "rank": rank, "host": named, "last": entry.get("last") is True}


class Reports:
    """This rank's reports, and on rank 0 those of all.

    Args:
        address: address of `dgcrun`, see ``envvars.desk_address``.
    """

    def __init__(self, address: str) -> None:
        self._board = StatusBoard([address])
        self._rank, self._workers = 0, 1
        self._all: list[dict[str, Any]] = []
        self._judged: dict[int, dict[str, Any]] = {}  # when they were, by rank
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def go_on_as(self, rank: int, workers: int) -> None:
        """From now on report as that one of so many ranks."""
        self._rank, self._workers = rank, workers
        if self._thread is None:
            self._thread = threading.Thread(target=self._report_on, name="dgc-reports", daemon=True)
            self._thread.start()

    def of_all(self) -> list[dict[str, Any]]:
        """What every rank has reported last, this one as it is now; in the order of ranks."""
        others = [figures for figures in self._all if figures["rank"] != self._rank]
        return sorted([*others, rank_figures(self._rank)], key=lambda figures: figures["rank"])

    def end(self) -> None:
        """Report for the last time; rank 0 waits for the others, who end at the same time, for a moment."""
        self._ended.set()
        with contextlib.suppress(OSError):  # dgcrun is gone
            self._report(last=True)
            deadline = time.monotonic() + _LAST_SECONDS
            alone = leaving.has_given_up.is_set()
            while self._rank == 0 and self._read() and not alone and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY)

    def _report_on(self) -> None:
        while not self._ended.wait(interval(self._workers)):
            with contextlib.suppress(OSError):  # dgcrun is out of reach; it may be back the next time
                self._report(last=False)
                if self._rank == 0:
                    self._read()
                    self._judge(self.of_all())

    def _judge(self, ranks: list[dict[str, Any]]) -> None:
        """Tell what is to be said of the steps since the last time.

        Ranks step together, so that one which is far behind the others reports no more, or has begun anew: it is not
        waited for.
        """
        recent = [_since(figures, self._judged.get(figures["rank"], {})) for figures in ranks]
        steps = [figures["timed_steps"] for figures in recent]
        if min(steps) < advice.FEW_STEPS and max(steps) < 2 * advice.FEW_STEPS:
            return
        advanced = [figures for figures in recent if figures["timed_steps"] >= advice.FEW_STEPS]
        advice.tell(advice.on_ranks(advanced))
        known = {figures["rank"] for figures in advanced}
        self._judged |= {figures["rank"]: figures for figures in ranks if figures["rank"] in known}

    def _report(self, last: bool) -> None:
        self._board.put(figures_of(self._rank), {**rank_figures(self._rank), "last": last})

    def _read(self) -> int:
        """Read what all have reported; returns how many will report again."""
        entries = self._board.get_all(PREFIX)
        found = [sound(entries.get(figures_of(rank)), rank) for rank in range(self._workers)]  # others may have left
        self._all = [figures for figures in found if figures is not None]
        return self._workers - sum(figures.pop("last") for figures in self._all)


def _since(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The figures of the time between two reports; since their beginning where another process counts anew."""
    if any(now[name] < before.get(name, 0) for name in COUNTERS):
        before = {}
    return {**now, **{name: now[name] - before.get(name, 0) for name in COUNTERS}}
