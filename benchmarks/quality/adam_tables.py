"""Compressed AdamW beside dense AdamW of the same seed, as Markdown and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.quality.analysis import Outcome
from benchmarks.quality.runs import ADAM_KEPT, ADAM_SEED, ADAM_WORKERS, FIRST_DENSE, LENGTHS, WORKERS
from benchmarks.quality.tasks import ALL_TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import ADAM, ADAM_DENSE, LOCAL_BETAS, POWER_SGD, VARIANTS
from benchmarks.report import markdown, save_figure, spread

TASK, LARGER, DENSE, DGC = "transformer", "gpt", "AdamW, dense", "AdamW, dgc"
LEAST = "AdamW, dgc, 0.1% in 2 bits"
NOTHING = f"0 runs are in benchmarks/results/{ADAM_KEPT.name} yet."


def gaps(found: Sequence[Outcome], run: Run, dense: Sequence[str] = (DENSE,)) -> list[float]:
    """Loss of `run` less the lowest of these dense runs, for every seed that has all of them."""
    by_run = {each.run: each.loss for each in found if each.run.task != TASK or each.run.seed >= ADAM_SEED}
    values = []
    for seed in sorted({each.seed for each in by_run}):
        mine = by_run.get(replace(run, seed=seed))
        theirs = [by_run.get(replace(run, seed=seed, variant=name, real=False)) for name in dense]
        known = [loss for loss in theirs if loss is not None]
        if mine is not None and len(known) == len(dense):
            values.append(mine - min(known))
    return values


def table(found: Sequence[Outcome], names: Sequence[str] = (*list(ADAM_DENSE)[1:], *ADAM)) -> str:
    """A line for each number of ranks, length and way to train."""
    places = [(workers, length, name) for workers in ADAM_WORKERS for length in LENGTHS for name in names]
    lines = []
    for run in (Run(TASK, name, workers, length=length) for workers, length, name in places):
        if values := gaps(found, run):
            better = gaps(found, run, FIRST_DENSE)
            figures = spread(values, "+.3f"), spread(better, "+.3f"), _less(found, run), len(values)
            lines.append([f"N = {run.workers}, {run.steps:,} steps", _named(run.variant), *figures])
    head = ["", "", "loss less dense AdamW's, nats", "less that of the better b1", "bytes of the run", "seeds"]
    return markdown(head, lines) if lines else NOTHING


def _named(variant: str) -> str:
    """A variant in the tables, with its density."""
    name = variant.removeprefix("AdamW, ").removeprefix("dgc, ")
    return f"1%{name.removeprefix('dgc')}" if name == "dgc" else f"1%, {name}" if name.startswith("b2") else name


def _less(found: Sequence[Outcome], run: Run) -> str:
    """Bytes that a run sends, in those of a dense one."""
    sent = [_traffic(each) for each in found if replace(each.run, seed=run.seed) == run]
    return "all" if run.variant in ADAM_DENSE else f"1/{1 / statistics.mean(sent):.1f}"


def _traffic(each: Outcome) -> float:
    """PowerSGD counts the bytes after its dense steps alone."""
    variant, steps = VARIANTS[each.run.variant], each.run.steps
    if not variant.power_sgd:
        return each.traffic
    return (variant.dense_steps + (steps - variant.dense_steps) * each.traffic) / steps


def _matrix(found: Sequence[Outcome], variants: Sequence[str], columns: Sequence[tuple[int, float]]) -> str:
    """A line a variant, a column for each N and length of which something was run."""
    cells = [[spread(gaps(found, Run(TASK, name, n, length=x)), "+.3f") for n, x in columns] for name in variants]
    if not any(map(any, cells)):
        return NOTHING
    head = [f"N = {n}, {Run(TASK, DENSE, n, length=x).steps:,} steps" for n, x in columns]
    names = map(_named, variants)
    return markdown(
        ["loss less dense AdamW's, nats", *head], [[name, *row] for name, row in zip(names, cells, strict=True)]
    )


def by_workers(found: Sequence[Outcome]) -> str:
    """The gap over N."""
    shown = (DGC, "AdamW, dgc, 0.3% in 2 bits")
    return _matrix(found, shown, [(workers, LENGTHS[1]) for workers in ADAM_WORKERS])


def by_length(found: Sequence[Outcome]) -> str:
    """The gap over the length of the run."""
    return _matrix(found, (DGC, LEAST), [(ADAM_WORKERS[0], length) for length in LENGTHS])


def larger(local: Sequence[Outcome], adam: Sequence[Outcome]) -> str:
    """The larger model: what was compressed at each step, and of the other study PowerSGD and local steps."""
    lines = []
    for found in (adam, local):
        by_run = {replace(each.run, seed=0): None for each in found if each.run.task == LARGER and each.run.length == 1}
        for run in sorted(by_run, key=lambda run: (list(VARIANTS).index(run.variant), run.workers)):
            values = gaps(found, run)
            if values and run.variant != DENSE:
                name = f"{_named(run.variant)}, N = {run.workers}"
                lines.append([name, spread(values, "+.3f"), _less(found, run), len(values)])
    return markdown(["loss less dense AdamW's, nats", "", "bytes of the run", "seeds"], lines)


def power_sgd(local: Sequence[Outcome], adam: Sequence[Outcome], workers: int = 4) -> str:
    """What PowerSGD sends after its dense steps beside density 1%, in words."""
    theirs = [each.traffic for each in local if each.run.task == LARGER and each.run.variant in POWER_SGD]
    ours = [each.traffic for each in adam if replace(each.run, seed=0) == Run(LARGER, DGC, workers)]
    if not theirs or not ours:
        return ""
    handed = statistics.mean(theirs) / statistics.mean(ours)
    received = handed * 2 * (workers - 1) / workers / (workers - 1)
    return (
        f"After its dense steps PowerSGD hands {handed:.2f} times the bytes of 1% to collectives. With N = {workers} a "
        f"rank receives {received:.2f} times as many: a ring of allreduce brings 2 (N-1)/N times what is handed over, "
        "a gather N-1 times."
    )


def blocks(local: Sequence[Outcome], adam: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page, by marker.

    Args:
        local: of the study that has local steps.
        adam: of this study.
    """
    parts = larger(local, adam), power_sgd(local, adam)
    return {
        "adam": table(adam),
        "adam-local": table(adam, list(LOCAL_BETAS)),
        "adam-workers": by_workers(adam),
        "adam-lengths": by_length(adam),
        "larger": "\n\n".join(filter(None, parts)),
    }


def draw(found: Sequence[Outcome], file: Path) -> None:
    """The gap over the density, a line for each number of ranks; what has no name of a density is not there."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.4, 3.4), layout="constrained")
    for workers, style in zip(WORKERS, ("-", "--"), strict=True):
        points = []
        for name in ADAM:
            config = VARIANTS[name].config(ALL_TASKS[TASK].settings)
            values = gaps(found, Run(TASK, name, workers, length=LENGTHS[1]))
            if config is not None and values and VARIANTS[name].betas == VARIANTS[DENSE].betas:
                deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                points.append((100 * config.density, statistics.mean(values), deviation))
        if points:
            axes.errorbar(*zip(*points, strict=True), fmt=f"o{style}", markersize=4, capsize=2, label=f"N = {workers}")
            axes.legend(frameon=False, fontsize=8)
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.07, 70)
    axes.set_xticks((0.1, 1, 10), ("0.1%", "1%", "10%"))
    axes.minorticks_off()
    axes.set_xlabel("density (2 bits below 1%)")
    axes.set_ylabel("loss less dense AdamW's, nats")
    axes.grid(alpha=0.3)
    save_figure(figure, file)
