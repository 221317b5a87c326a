"""Local steps beside dense AdamW and beside the same without compression, as Markdown; and the larger model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.quality.analysis import Outcome
from benchmarks.quality.exchange_tables import pairs
from benchmarks.quality.large import ALL_TASKS
from benchmarks.quality.runs import LENGTHS, WORKERS
from benchmarks.quality.tables import spread
from benchmarks.quality.training import Run
from benchmarks.quality.variants import AVERAGED, LOCAL, LOCAL_STEPS, VARIANTS
from benchmarks.report import markdown

DENSE, FIRST_SEED = "AdamW, dense", 500  # of this study on the small model


def table(found: Sequence[Outcome]) -> str:
    """A line for each task, number of ranks, length and H of which something was run."""
    lines = []
    for task, workers, length in _places(found):
        by_run = {each.run: each for each in found if each.run.seed >= (FIRST_SEED if task == "transformer" else 0)}
        for steps, averaged, local in zip(LOCAL_STEPS, AVERAGED, LOCAL, strict=True):
            dense, whole, sparse = (Run(task, name, workers, length=length) for name in (DENSE, averaged, local))
            added = pairs(by_run, sparse, whole)
            if added:
                config = VARIANTS[local].config(ALL_TASKS[task].settings)
                assert config is not None
                traffic = [each.traffic for run, each in by_run.items() if _same(run, sparse)]
                lines.append(
                    [
                        f"{ALL_TASKS[task].title}, N = {workers}, {sparse.steps:,} steps, H = {steps}",
                        spread(pairs(by_run, whole, dense), "+.3f"),
                        spread(pairs(by_run, sparse, dense), "+.3f"),
                        spread(added, "+.3f"),
                        f"{config.density * sparse.steps / steps:.1f}",
                        f"{1 / steps / statistics.mean(traffic):,.0f}×",
                        f"{1 / statistics.mean(traffic):,.0f}×",
                    ]
                )
    head = ["loss less dense AdamW, nats", "averaged every H", "compressed", "what compression adds"]
    return markdown([*head, "a coordinate is sent, times", "less an exchange", "less a step"], lines)


def _places(found: Sequence[Outcome]) -> list[tuple[str, int, float]]:
    known = {(each.run.task, each.run.workers, each.run.length) for each in found if each.run.variant in LOCAL}
    order = [(task, workers, length) for task in ALL_TASKS for workers in WORKERS for length in LENGTHS]
    return [place for place in order if place in known]


def _same(run: Run, other: Run) -> bool:
    return (run.task, run.variant, run.workers, run.length) == (other.task, other.variant, other.workers, other.length)
