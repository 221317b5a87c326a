"""The runs of the study, and their names in the file of results.

A launch is one horovodrun: it trains one task from one seed with several methods, one after the other, so that all
of them meet the machine in the same state and its start is paid for once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, read_results
from benchmarks.training.tasks import COMPRESSED, NO_OP, STOCK, STUDIED, TASKS, whole_steps

KEPT = RESULTS / "training.json.xz"
HOSTS = (2, 4)
FAST, SLOW = "1gbit", "100mbit"
FIRST_STEPS = 20  # of the stock methods on the slow link, where the whole run would take minutes
Study = dict[str, Any]  # ``runs`` by key, ``links`` in Mbit/s as measured by "hosts, rate"


def load(file: Path = KEPT) -> Study:
    """All results that are kept."""
    return {"links": {}, "runs": {}, **read_results(file)}


def key(task: str, hosts: int, rate: str, method: str, seed: int, steps: int | None = None) -> str:
    """Name of a run in the file of results; `steps` None is a whole run."""
    first = "" if steps in (None, whole_steps(TASKS[task], method)) else f", first {steps} steps"
    return f"{task}, {hosts} hosts, {rate}, {method}, seed {seed}{first}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One horovodrun: `methods` with their numbers of steps, for a task, a seed, so many hosts and a rate."""

    task: str
    hosts: int
    rate: str
    seed: int
    methods: tuple[tuple[str, int], ...]

    @classmethod
    def quick(cls, rate: str) -> Launch:
        """A launch of seconds."""
        return cls(
            "smoke", 2, rate, 0, tuple((name, whole_steps(TASKS["smoke"], name)) for name in (NO_OP, "dense", "dgc"))
        )

    def key(self, method: str, steps: int) -> str:
        """Name of one of its runs in the file of results."""
        return key(self.task, self.hosts, self.rate, method, self.seed, steps)

    def missing(self, kept: Mapping[str, Any]) -> Launch | None:
        """Its part that is not kept yet; None if nothing is missing."""
        left = tuple(run for run in self.methods if self.key(*run) not in kept)
        return dataclasses.replace(self, methods=left) if left else None


def plan(seeds: Sequence[int], tasks: Sequence[str] = STUDIED, hosts: Sequence[int] = HOSTS) -> Iterator[Launch]:
    """Every launch of the study, those of one lab one behind the other."""
    for count in hosts:
        for rate in (FAST, SLOW):
            for task in tasks:
                for seed in seeds:
                    yield Launch(task, count, rate, seed, tuple(_methods(task, count, rate, seed == min(seeds))))


def _methods(task: str, hosts: int, rate: str, first_seed: bool) -> Iterator[tuple[str, int]]:
    whole = [(method, whole_steps(TASKS[task], method)) for method in (NO_OP, *STOCK, *COMPRESSED)]
    if rate == FAST:
        yield from whole
        return
    yield from whole[-len(COMPRESSED) :]
    if first_seed:  # a step takes as long whatever the seed
        yield from ((method, FIRST_STEPS) for method in STOCK)
        if (task, hosts) == ("lstm", 2):  # the one whole run that shows that steps x time per step is the clock's time
            yield whole[1]
