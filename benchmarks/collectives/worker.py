"""One rank of `benchmarks.collectives`: every collective in turn, of every size; rank 0 writes the slowest of each.

horovodrun -np 2 python -m benchmarks.collectives.worker FILE '{"sizes": [1000], "seconds": 3, "most": 20}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

_UNTIMED, _LEAST = 3, 3


def _alltoall(buffer: torch.Tensor, name: str) -> Any:
    parts = torch.full((hvd.size(),), buffer.numel() // hvd.size(), dtype=torch.int32)
    return hvd.alltoall(buffer, splits=parts, name=name)


COLLECTIVES: dict[str, Callable[[torch.Tensor, str], Any]] = {
    "allgather": lambda buffer, name: hvd.allgather(buffer, name=name),
    "allreduce": lambda buffer, name: hvd.allreduce(buffer, name=name, op=hvd.Sum),
    "alltoall": _alltoall,
}


def measure(kind: str, nbytes: int, seconds: float, most: int) -> list[float]:
    """Milliseconds of each collective on the slowest rank; every rank hands over `nbytes`, and all begin together."""
    dtype = torch.float32 if kind == "allreduce" else torch.uint8
    buffer = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    times: list[float] = []
    count = most
    while len(times) < _UNTIMED + count:
        hvd.barrier()
        start = time.perf_counter()
        COLLECTIVES[kind](buffer, f"{kind}.{nbytes}")
        times.append(time.perf_counter() - start)
        if len(times) == _UNTIMED:
            slowest = max(hvd.allgather_object(times[-1], name="slowest"))
            count = max(_LEAST, min(most, int(seconds / slowest)))
    every = hvd.allgather_object(times[_UNTIMED:], name="times")
    return [round(1e3 * max(step), 3) for step in zip(*every, strict=True)]


def main() -> None:
    """Everything that the command line asks for."""
    file, words = sys.argv[1:]
    order = json.loads(words)
    torch.set_num_threads(1)
    hvd.init()
    found = [
        {"kind": kind, "nbytes": size, "ms": measure(kind, size, order["seconds"], order["most"])}
        for kind in COLLECTIVES
        for size in order["sizes"]
    ]
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
