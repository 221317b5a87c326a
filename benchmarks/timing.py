"""Times of functions, taken in turns so that all meet the same noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

RUNS, WARM_UP = 9, 3


def timed(
    *actions: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    runs: int = RUNS,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> list[float]:
    """Median milliseconds of each of `actions`.

    Args:
        before: called before every action, not timed: each finds the caches alike.
        runs: rounds that count, after a warm-up that does not.
        clock: function that calls an action and returns its milliseconds; else by the wall clock.
    """
    return [statistics.median(found) for found in times(*actions, before=before, runs=runs, clock=clock)]


def times(
    *actions: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    runs: int = RUNS,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> list[list[float]]:
    """As `timed`, every time that counts."""
    found: list[list[float]] = [[] for _ in actions]
    for number in range(WARM_UP + runs):
        for action, record in zip(actions, found, strict=True):
            before()
            taken = (clock or wall_clock)(action)
            if number >= WARM_UP:
                record.append(taken)
    return found


def wall_clock(action: Callable[[], Any]) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch, and with it our kernels, on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
