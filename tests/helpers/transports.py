"""What every transport promises, wherever its ranks live: a new one joins by a case that calls `checked`."""

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


def checked(transport: Any, as_tensor: Callable[[np.ndarray], Any], under_way: dict[str, Any]) -> dict[str, bool]:
    """Whether each collective has brought what it should; waited for in another order than they were started in."""
    wanted = expected(transport.rank, transport.workers)
    found = {name: transport.wait(pending) for name, pending in reversed(under_way.items())}
    return {name: np.array_equal(np.asarray(found[name]), wanted[name]) for name in wanted}
