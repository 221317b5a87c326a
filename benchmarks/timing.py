"""Times of functions, taken in turns so that all meet the same noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

RUNS, WARM_UP = 9, 3


def wall_clock(action: Callable[[], Any], now: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds of a call, by the seconds of `now`."""
    start = now()
    action()
    return 1e3 * (now() - start)


def timed(*actions: Callable[[], Any], **options: Any) -> list[float]:
    """Median milliseconds of each of `actions`; see `times`."""
    return [statistics.median(found) for found in times(*actions, **options)]


def times(
    *actions: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    runs: int = RUNS,
    clock: Callable[[Callable[[], Any]], float] = wall_clock,
) -> list[list[float]]:
    """Milliseconds of every call that counts, of each of `actions`.

    Args:
        before: called before every action, not timed: each finds the caches alike.
        runs: rounds that count, after a warm-up that does not.
        clock: function that calls an action and returns its milliseconds.
    """
    found: list[list[float]] = [[] for _ in actions]
    for number in range(WARM_UP + runs):
        for action, record in zip(actions, found, strict=True):
            before()
            taken = clock(action)
            if number >= WARM_UP:
                record.append(taken)
    return found


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch, and with it our kernels, on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
