"""Local steps beside dense AdamW and beside the same without compression, as Markdown; and the larger model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.quality.analysis import Outcome
from benchmarks.quality.runs import ADAM_SEED, LENGTHS, WORKERS
from benchmarks.quality.tasks import ALL_TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import (
    AVERAGED,
    LATER_AVERAGED,
    LATER_LOCAL,
    LOCAL,
    LOCAL_DENSER,
    LOCAL_GENTLER,
    LOCAL_STEPS,
    OUTER,
    VARIANTS,
)
from benchmarks.report import markdown, spread

DENSE = "AdamW, dense"
# local variant -> the one without compression, and H
BESIDE = {
    name: (averaged, steps)
    for names in (LOCAL, LOCAL_DENSER)
    for name, averaged, steps in zip(names, AVERAGED, LOCAL_STEPS, strict=True)
}
BESIDE |= {name: (averaged, steps) for name, averaged, steps in zip(LOCAL_GENTLER, AVERAGED, LOCAL_STEPS, strict=False)}
BESIDE |= {name: (averaged, 15) for name, averaged in zip(LATER_LOCAL, LATER_AVERAGED, strict=True)}


def table(found: Sequence[Outcome]) -> str:
    """A line for each task, number of ranks, length and H of which something was run."""
    lines = []
    for task, workers, length in _places(found):
        by_run = _of_task(found, task)
        for name, (averaged, steps) in BESIDE.items():
            runs = [Run(task, each, workers, length=length) for each in (DENSE, averaged, name)]
            of_a_seed = _of_shared_seeds(by_run, runs)
            if of_a_seed:
                sparse = runs[-1]
                config, later = VARIANTS[name].config(ALL_TASKS[task].settings), VARIANTS[name].dense_steps
                assert config is not None
                traffic = statistics.mean(each[-1].traffic for each in of_a_seed)
                place = f"{ALL_TASKS[task].title}, N = {workers}, {sparse.steps:,} steps, H = {steps}"
                losses = [[each.loss for each in row] for row in of_a_seed]
                gaps = zip(*((b - a, c - a, c - b) for a, b, c in losses), strict=True)
                lines.append(
                    [
                        f"{place}, {config.density:.1%}"
                        + f", momentum {config.outer_momentum}" * (name in LOCAL_GENTLER)
                        + f", after {later} dense steps" * bool(later),
                        *(spread(values, "+.3f") for values in gaps),
                        len(losses),
                        f"{config.density * (sparse.steps - later) / steps:.1f}",
                        f"{1 / steps / traffic:,.0f}×",
                        f"{1 / traffic:,.0f}×",
                    ]
                )
    head = ["loss less dense AdamW, nats", "averaged every H", "compressed", "what the recipe adds", "seeds"]
    return markdown([*head, "a coordinate is sent, times", "less an exchange", "less a step"], lines)


def outer(found: Sequence[Outcome]) -> str:
    """A line for each place of which whole weights were averaged with outer momentum, beside none and beside ours."""
    lines = []
    for task, workers, length in _places(found):
        by_run = _of_task(found, task)
        for steps, averaged, denser in zip(LOCAL_STEPS, AVERAGED, LOCAL_DENSER, strict=True):
            names = [DENSE, averaged, *(f"{averaged}, {name}" for name in OUTER), denser]
            rows = _of_shared_seeds(by_run, [Run(task, name, workers, length=length) for name in names])
            if rows:
                gaps = zip(*([each.loss - row[0].loss for each in row[1:]] for row in rows), strict=True)
                place = f"{ALL_TASKS[task].title}, N = {workers}, {rows[0][0].run.steps:,} steps, H = {steps}"
                lines.append([place, *(spread(values, "+.3f") for values in gaps), len(rows)])
    head = [
        "loss less dense AdamW, nats",
        "averaged every H",
        "the same with Nesterov 0.5",
        "DiLoCo: Nesterov 0.9, rate 0.7",
    ]
    return markdown([*head, "compressed to 6%, Nesterov 0.5", "seeds"], lines)


def _of_task(found: Sequence[Outcome], task: str) -> dict[Run, Outcome]:
    """The outcomes of this study."""
    return {each.run: each for each in found if each.run.seed >= (ADAM_SEED if task == "transformer" else 0)}


def _places(found: Sequence[Outcome]) -> list[tuple[str, int, float]]:
    known = {(each.run.task, each.run.workers, each.run.length) for each in found if each.run.variant in BESIDE}
    order = [(task, workers, length) for task in ALL_TASKS for workers in WORKERS for length in LENGTHS]
    return [place for place in order if place in known]


def _of_shared_seeds(by_run: dict[Run, Outcome], runs: Sequence[Run]) -> list[list[Outcome]]:
    """The outcomes of all of `runs`, for every seed that each of them has: its columns are of the same seeds."""
    found = ([by_run.get(replace(run, seed=seed)) for run in runs] for seed in sorted({run.seed for run in by_run}))
    return [[each for each in row if each is not None] for row in found if None not in row]
