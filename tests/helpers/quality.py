"""Runs of the learning-quality study, followed step by step; in a process of their own, whose arithmetic they set."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.quality.training import MakeRanks, Run, simulated, train
from benchmarks.training.worker import digest


def in_processes(function: Callable[..., Any], words: Iterable[Any]) -> list[Any]:
    """`function` of each of `words`, two at a time: `train` sets torch's threads and its treatment of denormals."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, words))


def followed(run: Run, make_ranks: MakeRanks = simulated, steps: int = 40) -> dict[str, list[Any]]:
    """The first steps of a run: the bits of all weights, and the loss, after each of them."""
    found: dict[str, list[Any]] = {"weights": [], "losses": []}

    class Followed:
        """Ranks of which every step is noted."""

        def __init__(self, *words: Any) -> None:
            self._model = words[1].model
            self._ranks = make_ranks(*words)
            self.optimizer, self.exchange = self._ranks.optimizer, self._ranks.exchange

        def step(self, loss_of: Any) -> float:
            loss = self._ranks.step(loss_of)
            found["weights"].append(digest(self._model))
            found["losses"].append(loss)
            return loss

    train(run, Followed, steps)
    return found
