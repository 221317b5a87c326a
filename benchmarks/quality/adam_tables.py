"""AdamW with a second moment that stays, by the number of dense steps before, as Markdown and as a plot."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.quality.analysis import Outcome
from benchmarks.quality.exchange_tables import pairs
from benchmarks.quality.large import ALL_TASKS
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
_OWN = "{0} steps at density 1, each rank's own moments"
_SEEDS = {1: " (one seed)", 2: " (two seeds)"}  # where a cell has fewer than three


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
        **{f"AdamW, own after {steps}": _OWN.format(steps) for steps in OWN_AFTER},
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
    lines = [[name, *(_cell(found, variant, *place) for place in places)] for variant, name in named.items()]
    head = [f"N = {workers}, {_run(TODAY, workers, length).steps:,} steps" for workers, length in places]
    return markdown(["second moment; loss less dense AdamW, nats", *head], [line for line in lines if any(line[1:])])


def _cell(found: Sequence[Outcome], variant: str, workers: int, length: float) -> str:
    """The gap, and of how few seeds; empty where every step is dense, so that nothing is ever compressed."""
    values = gaps(found, variant, workers, length)
    if _dense_steps(variant) >= _run(variant, workers, length).steps:
        return ""
    return spread(values, "+.3f") + _SEEDS.get(len(values), "")


def _dense_steps(variant: str) -> float:
    """How many a variant begins with, at most."""
    config = VARIANTS[variant].config(ALL_TASKS[TASK].settings)
    if config is None or config.warmup is None or config.warmup.first_density < 1:
        return 0
    return (config.warmup.steps or 0) / config.warmup.stages(config.density)


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
                _traffic(each) for other, each in by_run.items() if replace(other, seed=run.seed) == run
            )
            name = f"{_named(variant)}, N = {workers}"
            lines.append([name, spread(values, "+.3f"), f"1/{1 / traffic:.1f}", len(values)])
    return markdown(["loss less dense AdamW, nats", "", "bytes sent, of dense", "seeds"], lines)


def _named(variant: str) -> str:
    """A variant in the table of the larger model."""
    name = variant.removeprefix("AdamW, ")
    if not name.startswith("own after "):
        return name
    steps, *others = name.removeprefix("own after ").split(", ")
    return ", ".join([_OWN.format(steps), *others])


def _step_bytes(found: Sequence[Outcome], task: str, workers: int, length: float) -> tuple[float, float] | None:
    """What a rank hands over at a dense step and at one after them, at 1%, in the bytes of fp32.

    From two runs that differ in how many steps are dense; None for lack of one.
    """
    kept = {each.run.variant: each for each in found if _is_at(each.run, task, workers, length)}
    first, then = FROZEN_AFTER[-2:]
    fewer, more = (kept.get(f"AdamW, frozen after {steps}") for steps in (first, then))
    if fewer is None or more is None:
        return None
    more_of_a_step = (more.traffic - fewer.traffic) * more.run.steps / (then - first)
    rest = fewer.traffic - first / fewer.run.steps * more_of_a_step
    return rest + more_of_a_step, rest


def _is_at(run: Run, task: str, workers: int, length: float) -> bool:
    return (run.task, run.workers, run.length, run.real) == (task, workers, length, False)


def shares(found: Sequence[Outcome]) -> str:
    """What the dense steps of the table send beside the rest, in words."""
    words, dense, length = [], FROZEN_AFTER[-1], LENGTHS[1]
    for workers in WORKERS:
        of_a_step = _step_bytes(found, TASK, workers, length)
        if of_a_step:
            steps = _run(DENSE, workers, length).steps
            times = dense * of_a_step[0] / ((steps - dense) * of_a_step[1])
            words.append(f"{times:.0f} times with N = {workers}")
    first = f"Of {_run(DENSE, WORKERS[0], length).steps:,} steps {dense} dense ones send more than the rest do at 1%: "
    return f"{first}{', '.join(words)}." if words else ""


def power_sgd(found: Sequence[Outcome], workers: int = 4) -> str:
    """What PowerSGD sends after its dense steps beside density 1%, in words."""
    kept = [each.traffic for each in found if each.run.task == LARGER and VARIANTS[each.run.variant].power_sgd]
    of_a_step = _step_bytes(found, LARGER, workers, LENGTHS[0])
    if not kept or not of_a_step:
        return ""
    handed = statistics.mean(kept) / of_a_step[1]
    received = handed * 2 * (workers - 1) / workers / (workers - 1)
    return (
        f"After its dense steps PowerSGD hands {handed:.2f} times the bytes of 1% to collectives. With N = {workers} a "
        f"rank receives {received:.2f} times as many: a ring of allreduce brings 2 (N-1)/N times what is handed over, "
        "a gather N-1 times."
    )


def _traffic(each: Outcome) -> float:
    """Bytes sent over the whole run, in those of dense: PowerSGD counts those after its dense steps alone."""
    variant, steps = VARIANTS[each.run.variant], each.run.steps
    if not variant.power_sgd:
        return each.traffic
    return (variant.dense_steps + (steps - variant.dense_steps) * each.traffic) / steps


def blocks(found: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page, by marker."""
    made = {"frozen-adam": (table(found), shares(found)), "larger": (larger(found), power_sgd(found))}
    return {name: "\n\n".join(filter(None, parts)) for name, parts in made.items()}


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
