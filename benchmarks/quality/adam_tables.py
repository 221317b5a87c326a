"""AdamW with a second moment that stays, by the number of dense steps before, as Markdown and as a plot."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.quality.analysis import Outcome
from benchmarks.quality.exchange_tables import pairs
from benchmarks.quality.runs import LENGTHS, WORKERS
from benchmarks.quality.tables import spread
from benchmarks.quality.training import Run
from benchmarks.quality.variants import (
    ADAM,
    FALLING_AFTER,
    FROZEN_AFTER,
    OWN_AFTER,
    REFRESHED,
    REFRESHED_AFTER,
    REFRESHED_EVERY,
    SETTLED,
    VARIANTS,
)
from benchmarks.report import markdown, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASK, LARGER, DENSE, TODAY = "transformer", "gpt", "AdamW, dense", "AdamW, dgc"
FIRST_SEED = 500  # of this study


def gaps(found: Sequence[Outcome], variant: str, workers: int, length: float) -> list[float]:
    """Loss less that of dense AdamW, for every seed that both have."""
    by_run = {each.run: each for each in found if each.run.seed >= FIRST_SEED}
    return pairs(by_run, _run(variant, workers, length), _run(DENSE, workers, length))


def _run(variant: str, workers: int, length: float) -> Run:
    return Run(TASK, variant, workers, length=length)


def table(found: Sequence[Outcome]) -> str:
    """A line for each way to begin, a column for each number of ranks and length."""
    named = {
        TODAY: "each rank's own",
        **{f"AdamW, own after {steps}": f"own after {steps} dense" for steps in OWN_AFTER},
    }
    named |= {f"AdamW, frozen after {steps}": f"frozen after {steps} dense" for steps in FROZEN_AFTER}
    falls = "frozen after {0} dense, then {0} each at 25%, 6%, 1.6%"
    named |= {f"AdamW, frozen after {steps}, density falls": falls.format(steps) for steps in FALLING_AFTER}
    named |= {name: _settled(found, name) for name in SETTLED}
    beside = f"frozen after {REFRESHED_AFTER} dense, refreshed every "
    named |= {
        name: beside + ("step" if every == 1 else f"{every} steps")
        for name, every in zip(REFRESHED, REFRESHED_EVERY, strict=True)
    }
    places = [(workers, length) for workers in WORKERS for length in LENGTHS]
    places = [place for place in places if gaps(found, TODAY, *place)]
    lines = [
        [name, *(spread(gaps(found, variant, *place), "+.3f") for place in places)] for variant, name in named.items()
    ]
    head = [f"N = {workers}, {_run(TODAY, workers, length).steps:,} steps" for workers, length in places]
    return markdown(["second moment; loss less dense AdamW, nats", *head], [line for line in lines if any(line[1:])])


def _settled(found: Sequence[Outcome], variant: str) -> str:
    """In words, after how many dense steps it had settled."""
    change, *falls = variant.removeprefix("AdamW, settled to ").split(", ")
    ends = sorted(each.settled_at for each in found if each.run.variant == variant and each.settled_at)
    when = f", after {ends[0]} to {ends[-1]}" if ends else ""
    return f"frozen once it changes by {change} or less{when}" + ", then as many each at 25%, 6%, 1.6%" * len(falls)


def larger(found: Sequence[Outcome]) -> str:
    """A line for each variant and number of ranks of which the larger model was trained."""
    by_run = {each.run: each for each in found if each.run.task == LARGER}
    lines = []
    for variant, workers in itertools.product(dict.fromkeys(run.variant for run in by_run), WORKERS):
        run = Run(LARGER, variant, workers, real=bool(VARIANTS[variant].power_sgd))
        values = pairs(by_run, run, Run(LARGER, DENSE, workers))
        if values and variant != DENSE:
            traffic = statistics.mean(
                _traffic(each) for run, each in by_run.items() if (run.variant, run.workers) == (variant, workers)
            )
            name = f"{variant.removeprefix('AdamW, ')}, N = {workers}"
            lines.append([name, spread(values, "+.3f"), f"1/{1 / traffic:.1f}", len(values)])
    return markdown(["loss less dense AdamW, nats", "", "bytes sent, of dense", "seeds"], lines)


def _traffic(each: Outcome) -> float:
    """Bytes sent over the whole run, in those of dense: PowerSGD counts those after its dense steps alone."""
    variant, steps = VARIANTS[each.run.variant], each.run.steps
    if not variant.power_sgd:
        return each.traffic
    return (variant.dense_steps + (steps - variant.dense_steps) * each.traffic) / steps


def blocks(found: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page, by marker."""
    return {"frozen-adam": table(found), "larger": larger(found)}


def draw(found: Sequence[Outcome], file: Path) -> None:
    """The gap over the number of dense steps, and over how often the second moment is refreshed afterwards."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8.4, 3.6), layout="constrained", sharey=True, width_ratios=(3, 2)
    )
    _draw_dense_steps(found, left)
    _draw_refreshes(found, right)
    for axes in (left, right):
        axes.axhline(0.03, color="gray", linewidth=0.8)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    left.set_yticks((0.01, 0.03, 0.1, 0.3), ("0.01", "0.03", "0.1", "0.3"))
    left.minorticks_off()
    left.set_ylabel("loss less dense AdamW, nats")
    save_figure(figure, file)


def _draw_dense_steps(found: Sequence[Outcome], axes: Axes) -> None:
    """A line for each number of ranks and length."""
    steps = FROZEN_AFTER
    for workers, style in zip(WORKERS, ("-", "--"), strict=True):
        for length, color in zip(LENGTHS, ("C0", "C1", "C2"), strict=True):
            values = [gaps(found, name, workers, length) for name in ADAM]
            total = _run(TODAY, workers, length).steps
            known = [(w, sum(v) / len(v)) for w, v in zip(steps, values, strict=True) if v and w < total]
            if known:
                axes.loglog(*zip(*known, strict=True), style, color=color, marker="o", markersize=4,
                            label=f"N = {workers}, {total:,} steps")  # fmt: skip
    axes.set_xticks(steps, map(str, steps))
    axes.set_xlabel("W, dense steps before the second moment stays")


def _draw_refreshes(found: Sequence[Outcome], axes: Axes) -> None:
    """One line, with the spread over seeds."""
    workers, length = min(WORKERS), LENGTHS[1]
    names = [*REFRESHED, f"AdamW, frozen after {REFRESHED_AFTER}"]
    values = [gaps(found, name, workers, length) for name in names]
    known = [(place, each) for place, each in enumerate(values) if each]
    axes.errorbar(
        [place for place, _ in known],
        [statistics.mean(each) for _, each in known],
        [statistics.stdev(each) if len(each) > 1 else 0.0 for _, each in known],
        color="C1", marker="o", markersize=4, capsize=3,
        label=f"W = {REFRESHED_AFTER}, N = {workers}, {_run(TODAY, workers, length).steps:,} steps",
    )  # fmt: skip
    axes.set_xticks(range(len(names)), [*map(str, REFRESHED_EVERY), "never"])
    axes.set_xlabel("R, steps between two refreshes")
