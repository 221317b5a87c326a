"""What the exchanges of this process have sent, received and cost: counted where it happens, added up at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Bytes this rank hands to collectives and receives from them, counted as for ring algorithms; and seconds.

    What workers of one node tell each other crosses no network, and is counted apart.
    """

    sent: int = 0
    received: int = 0
    inside: int = 0  # received inside the node
    compressing: float = 0.0  # seconds in compression
    decoding: float = 0.0  # and in putting together what came back
    waiting: float = 0.0  # seconds in which nothing was left to do but wait for the other ranks

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # buckets may be compressed by several threads

    def count(self, sent: int, received: int) -> None:
        """Count a collective by the bytes that this rank hands over, and those it receives."""
        self._add(sent=sent, received=received)

    def count_inside(self, received: int) -> None:
        """Count a collective among the workers of a node by the bytes that this rank receives."""
        self._add(inside=received)

    def count_allreduce(self, nbytes: int, workers: int) -> None:
        """Count a ring allreduce of `nbytes`."""
        self._add(sent=nbytes, received=ring_received(nbytes, workers))

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the time spent inside to "compressing", "decoding" or "waiting"."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._add(**{what: time.perf_counter() - start})

    def waited(self, seconds: float) -> None:
        """Count time in which nothing was left to do."""
        self._add(waiting=seconds)

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)


def ring_received(nbytes: int, workers: int) -> int:
    """Bytes each rank receives in a ring allreduce of `nbytes`: ``2*(N-1)/N`` of them."""
    return 2 * (workers - 1) * nbytes // workers


@dataclass
class ExchangeStats:
    """One exchange's counts. It is small and outlives the exchange, whose gradients and residuals are not.

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
    steps: int = 0
    steps_alone: int = 0  # of the script's, without an exchange
    offered: int = 0  # elements on the sparse path, also of a step that was not finished
    selected: int = 0  # and how many of them were sent
    buckets: Callable[[], Callable[[], list[dict[str, float]]] | None] = lambda: None  # while the exchange is alive

    def stats(self) -> dict[str, float]:
        """The counts, beside those of fp32 ring allreduces of all tensors."""
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
            "compress_seconds": self.traffic.compressing + self.traffic.decoding,
            "exchange_seconds": self.traffic.waiting,
        }


all_exchanges: list[ExchangeStats] = []  # of every exchange that this process has made


def total(tallies: list[ExchangeStats]) -> dict[str, float]:
    """The stats of several exchanges together."""
    none = ExchangeStats(1, 0).stats()
    each = [counts.stats() for counts in tallies]
    return {name: sum(stats[name] for stats in each) for name in none}


def bucket_stats(tallies: list[ExchangeStats]) -> list[dict[str, float]]:
    """What every bucket of several exchanges is like, of those that are still there."""
    alive = [found for counts in tallies if (found := counts.buckets()) is not None]
    return [bucket for stats in alive for bucket in stats()]
