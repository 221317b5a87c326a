"""What every transport promises, wherever its ranks live: a new one joins by a test that calls `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

PART = 3  # elements that one rank sends another in an alltoall


def given(rank: int, workers: int) -> np.ndarray:
    """What a rank hands to a collective."""
    return (100 * rank + np.arange(PART * workers)).astype(np.float32)


def expected(rank: int, workers: int) -> dict[str, np.ndarray]:
    """What each collective brings to a rank."""
    everybody = [given(other, workers) for other in range(workers)]
    mine = slice(PART * rank, PART * (rank + 1))
    return {
        "allgather": np.concatenate(everybody),
        "allreduce": sum(everybody[1:], everybody[0]),
        "alltoall": np.concatenate([values[mine] for values in everybody]),
        "broadcast": everybody[workers - 1],
    }


def started(transport: Any, as_tensor: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """All collectives under way at once."""
    rank, workers = transport.rank, transport.workers
    make = lambda: as_tensor(given(rank, workers))  # noqa: E731
    return {
        "allgather": transport.allgather(make(), "gathered"),
        "allreduce": transport.allreduce(make(), "summed"),
        "alltoall": transport.alltoall(make(), "parted"),
        "broadcast": transport.broadcast(make(), "told", workers - 1),
    }


def check(transport: Any, as_tensor: Callable[[np.ndarray], Any], under_way: dict[str, Any] | None = None) -> None:
    """Each collective brings what it should; waited for in another order than they were started in."""
    under_way = under_way or started(transport, as_tensor)
    for name, pending in reversed(under_way.items()):
        found = np.asarray(transport.wait(pending))
        np.testing.assert_array_equal(found, expected(transport.rank, transport.workers)[name], name)
