"""Counters of all exchanges of this process: bytes sent and received, steps, seconds."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard

_SKIPS_KEPT = 20
PARTS = ("compress_seconds", "decode_seconds", "wait_seconds")  # of "step_seconds"
COUNTERS = ("timed_steps", "step_seconds", *PARTS)


@dataclass
class Traffic:
    """Bytes this rank hands to collectives and receives from them, counted as for ring algorithms; and seconds.

    Bytes between workers of one node cross no network, and are counted apart.
    """

    sent: int = 0
    received: int = 0
    inside: int = 0  # received inside the node
    compressing: float = 0.0  # seconds of compression
    decoding: float = 0.0  # seconds of decoding and adding packets
    waiting: float = 0.0  # seconds in which this rank only waited for other ranks

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # buckets may be compressed by several threads

    def add(self, **amounts: float) -> None:
        """Add bytes or seconds, by name of the field."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def count_allreduce(self, nbytes: int, workers: int) -> None:
        """Count a ring allreduce of `nbytes`."""
        self.add(sent=nbytes, received=ring_received(nbytes, workers))

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the time spent inside to "compressing", "decoding" or "waiting"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{what: time.perf_counter() - start})


def ring_received(nbytes: int, workers: int) -> int:
    """Bytes each rank receives in a ring allreduce of `nbytes`: ``2*(N-1)/N`` of them."""
    return 2 * (workers - 1) * nbytes // workers


def is_figure(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; a whole one, from a file or another rank, may have thousands of digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def size(nbytes: float) -> str:
    """Bytes as people read them, with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


@dataclass
class ExchangeStats:
    """Counters of one exchange. They are small, and outlive the exchange with its gradients and residuals.

    Args:
        workers: N >= 1.
        elements: number of elements of all tensors together.
        traffic: bytes and seconds of its collectives.
        density: density after the warm-up, which a budget may have lowered.
    """

    workers: int
    elements: int
    traffic: Traffic = field(default_factory=Traffic)
    density: float = 1.0
    mode: str = ""  # present exchange, if a job chooses among several
    trial_seconds: dict[str, float] = field(default_factory=dict)  # measured seconds of a step, by exchange
    steps: int = 0
    steps_alone: int = 0  # steps of the script without an exchange
    pending: int = 0  # local steps since the last exchange
    count_pending: Callable[[], int] = lambda: 0  # the same, if a graph counts them
    density_now: float = 0.0  # density of the last step; 0 before the first
    offered: int = 0  # elements on the sparse path, also of a step that was not finished
    selected: int = 0  # elements that were sent
    skipped: int = 0  # steps that were applied on no rank
    skipped_in_a_row: int = 0  # up to the last step
    left_out: int = 0  # local steps that this rank alone has skipped
    skips: list[tuple[int, str]] = field(default_factory=list)  # the first: number of the step, place of the cause
    figures: dict[str, float] = field(default_factory=dict)  # health of the compression
    buckets: Callable[[], Callable[[], list[dict[str, float]]] | None] = lambda: None  # while the exchange is alive

    def __post_init__(self) -> None:
        self.steps_of: dict[str, int] = {}  # by `mode`
        self.before_skips = 0  # steps before the first that was skipped
        self.ends = ((0.0,) * 4,) * 2  # seconds spent until the end of the first step and of the last, as in `times`

    def end_step(self, skipped_at: tuple[int, str] | None = None) -> None:
        """Count a step; `skipped_at`: number of a skipped step, and the place of the cause."""
        if skipped_at is None:
            self.skipped_in_a_row = 0
        else:
            self.before_skips = self.before_skips if self.skipped else self.steps
            self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
            if len(self.skips) < _SKIPS_KEPT:
                self.skips.append(skipped_at)
        self.steps += 1
        self.steps_of[self.mode] = self.steps_of.get(self.mode, 0) + 1
        now = time.perf_counter(), self.traffic.compressing, self.traffic.decoding, self.traffic.waiting
        self.ends = self.ends[0] if any(self.ends[0]) else now, now

    def close(self) -> None:
        """Count, at the end of the job, the local steps of a graph that no exchange has followed."""
        left, self.count_pending = self.count_pending(), lambda: 0
        self.pending += left
        self.steps_alone += left

    def times(self) -> dict[str, float]:
        """Seconds of all steps but the first, in which ranks that are early wait for others to start, and compile.

        Returns:
            ``timed_steps``: their number; ``step_seconds``, from the end of the first to the end of the last, and the
            parts ``compress_seconds``, ``decode_seconds``, ``wait_seconds``: waiting for other ranks.
        """
        spent = {name: last - first for name, first, last in zip(COUNTERS[1:], *self.ends, strict=True)}
        return {"timed_steps": max(0, self.steps - 1), **spent}

    def stats(self) -> dict[str, float]:
        """Return the counters, and those that fp32 ring allreduces of all tensors would have."""
        dense = 4 * (self.steps + self.steps_alone) * self.elements
        return {
            "steps": self.steps,
            "elements": self.offered,
            "selected": self.selected,
            "bytes_sent": self.traffic.sent,
            "bytes_received": self.traffic.received,
            "bytes_inside_node": self.traffic.inside,
            "bytes_dense": dense,
            "bytes_dense_received": ring_received(dense, self.workers),
            "compress_seconds": self.traffic.compressing,
            "decode_seconds": self.traffic.decoding,
            "exchange_seconds": self.traffic.waiting,
            "skipped": self.skipped,
        }


class Process:
    """State that a process has once, whatever it trains.

    Attributes:
        exchanges: counters of every exchange that was made.
        replica_checks, replica_mismatches: comparisons of the ranks' weights, and those that found a difference.
        advice: warnings that were given, by kind.
        is_recorded: whether metrics are written to a file.
        tells_at_end: whether an exit handler will give the warnings of the end.
    """

    def __init__(self) -> None:
        self.exchanges: list[ExchangeStats] = []
        self.replica_checks = self.replica_mismatches = 0
        self.advice: dict[str, str] = {}
        self.is_recorded = self.tells_at_end = False
        self._numbers: dict[str, Iterator[int]] = {}

    def next_number(self, of: str) -> int:
        """Return the next number, from 0, under the name `of`: the same on every rank if they ask in the same order."""
        return next(self._numbers.setdefault(of, itertools.count()))


# The one object of the package that lives as long as the process: exit handlers, the metrics file and `dgcrun` need
# the counters of all optimizers, also of those that are gone, and Horovod belongs to the process too
PROCESS = Process()


def total(tallies: list[ExchangeStats]) -> dict[str, float]:
    """The stats of several exchanges together."""
    return _sum([counts.stats() for counts in [ExchangeStats(1, 0), *tallies]])


def times(tallies: list[ExchangeStats]) -> dict[str, float]:
    """The times of several exchanges together; where two optimizers step in turn, seconds of both count once."""
    found, until = _sum([counts.times() for counts in [ExchangeStats(1, 0), *tallies]]), 0.0
    found[COUNTERS[1]] = 0.0
    for first, last in sorted((counts.ends[0][0], counts.ends[1][0]) for counts in tallies):
        found[COUNTERS[1]] += max(0.0, last - max(first, until))
        until = max(until, last)
    return found


def _sum(each: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(numbers[name] for numbers in each) for name in each[0]}


def figures(tallies: list[ExchangeStats]) -> dict[str, float]:
    """Return the figures of the last step that was examined, see `Diagnostics.close`; those of the largest exchange."""
    found = [counts for counts in tallies if counts.figures]
    return dict(max(found, key=lambda counts: counts.elements).figures) if found else {}


def skips(tallies: list[ExchangeStats]) -> list[tuple[int, str]]:
    """Return the first skipped steps: numbers from 0, and the place of the cause."""
    return sorted(skip for counts in tallies for skip in counts.skips)[:_SKIPS_KEPT]


def bucket_stats(tallies: list[ExchangeStats]) -> list[dict[str, float]]:
    """Return the figures of every bucket of the exchanges that are still alive."""
    alive = [found for counts in tallies if (found := counts.buckets()) is not None]
    return [bucket for stats in alive for bucket in stats()]
