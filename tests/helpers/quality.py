"""Runs of the learning-quality study, followed step by step; in a process of their own, whose arithmetic they set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.quality.training import MakeRanks, Run, simulated, train
from benchmarks.report import pool

STEPS = 80


def in_processes(function: Callable[..., Any], words: Iterable[Any]) -> list[Any]:
    """`function` of each of `words`, two at a time: `train` sets torch's threads and its treatment of denormals."""
    with pool(2) as workers:
        return list(workers.map(function, words))


def followed(run: Run, make_ranks: MakeRanks = simulated) -> dict[str, list[Any]]:
    """The bits of rank 0's (or a real rank's own) weights, and the loss, after each of the first steps of a run."""
    found: dict[str, list[Any]] = {"weights": [], "losses": []}

    def watch(ranks: Any, step: int, loss: float) -> None:
        bits = [p.detach().numpy().tobytes() for p in ranks.optimizer.param_groups[0]["params"]]
        found["weights"].append(hashlib.sha256(b"".join(bits)).hexdigest())
        found["losses"].append(loss)

    train(run, make_ranks, steps=STEPS, points=1, watch=watch)
    return found
