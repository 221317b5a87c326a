"""What every rank tells of itself while the job runs, by way of `dgcrun`: how long it waits for the others, and so on.

A thread of each rank reports, a thread of rank 0 reads what all have reported. No collective, no graph and no step of
the training knows of it: a rank that is slow, or stuck in a collective, reports like any other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from dgc_horovod import advice, leaving
from dgc_horovod.launch.status_server import StatusBoard
from dgc_horovod.recording import EVERY, rank_figures
from dgc_horovod.stats import COUNTERS, is_figure

PREFIX = "figures."
_MOST_A_SECOND = 20  # reports of all ranks together
_LAST_SECONDS, _LOOK_EVERY = 2.0, 0.05  # that rank 0 waits for the last reports of the others


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
