"""How evenly what is selected falls on owners, by the number of elements that are dealt together.

The largest elements of v are taken from training runs of the study's models, two workers, every tenth step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Ranks, Run, train
from benchmarks.report import markdown
from dgc_horovod.exchange.sharded import slot_room

CHUNKS, OWNERS = (1, 7, 16, 64, 256, 1024), (8, 32)
_STEPS, _FIRST, _EVERY = 200, 100, 10


def left(task: str) -> dict[tuple[int, int], float]:
    """(owners, chunk) -> mean share of the selected elements that `slot_room` has no room for."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)

    def watch(ranks: Ranks, step: int, loss: float) -> None:
        if step < _FIRST or step % _EVERY:
            return
        for engine in (each for exchange in ranks.exchanges for each in exchange.engines):
            if not engine.bucket.uncompressed:
                k = round(TASKS[task].settings.density * engine.bucket.numel)
                chosen = np.argpartition(-np.abs(engine.kernels.to_host(engine.state.v)), k)[:k]
                for owners in OWNERS:
                    room = slot_room(k / owners)
                    for chunk in CHUNKS:
                        counts = np.bincount(chosen // chunk % owners, minlength=owners)
                        found[owners, chunk].append(float(np.maximum(counts - room, 0).sum() / k))

    train(Run(task, "dgc, no warm-up", 2, 7), steps=_STEPS, points=1, watch=watch)
    return {key: float(np.mean(values)) for key, values in found.items()}


def main() -> None:
    """Print the table."""
    lines = []
    for task in TASKS:
        shares = left(task)
        for owners in OWNERS:
            cells = [f"{shares[owners, chunk]:.1%}" for chunk in CHUNKS]
            lines.append([f"{TASKS[task].title}, {owners} owners", *cells])
    print(markdown(["does not fit, by elements dealt together", *map(str, CHUNKS)], lines))


if __name__ == "__main__":
    main()
