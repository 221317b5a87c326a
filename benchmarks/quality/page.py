"""The tables and plots of docs/quality.md, from the files of the study.

First AdamW, compressed at each step and with local steps, beside dense AdamW of the same seed; then the others.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.quality import plots, runs, selection, tables
from benchmarks.quality import variants as all_of
from benchmarks.quality.runs import ADAM_KEPT, ADAM_SEED, ADAM_WORKERS, FIRST_DENSE, LENGTHS, NODES, WORKERS
from benchmarks.quality.selection import MOMENTS
from benchmarks.quality.tables import Outcome, gaps, is_clear, paired
from benchmarks.quality.tasks import ALL_TASKS, TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import ADAM, ADAM_DENSE, AUTOMATIC, AVERAGED, LOCAL_STEPS, UNMASKED, VARIANTS
from benchmarks.report import (
    IMAGES,
    label,
    markdown,
    mean_and_deviation,
    panels,
    read_results,
    save_figure,
    spread,
    where,
)

TASK, LARGER, DENSE, DGC = "transformer", "gpt", "AdamW, dense", "AdamW, dgc"
LEAST = "AdamW, dgc, 0.1% in 2 bits"
NOTHING = f"0 runs are in benchmarks/results/{ADAM_KEPT.name} yet."
LOSS = "loss minus dense AdamW, nats"
# local variant -> the one without compression, and H
_GROUPS = [(names, AVERAGED, LOCAL_STEPS) for names in (all_of.LOCAL, all_of.LOCAL_DENSER, all_of.LOCAL_GENTLER)]
_GROUPS += [(all_of.LATER_LOCAL, all_of.LATER_AVERAGED, (15,))]
BESIDE = {name: beside for names, *others in _GROUPS for name, *beside in zip(names, *others, strict=False)}


def _of_study(found: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of these studies: the small model has seeds of its own here."""
    return [each for each in found if each.run.task != TASK or each.run.seed >= ADAM_SEED]


def to_dense(found: Sequence[Outcome], run: Run, dense: Sequence[str] = (DENSE,)) -> list[float]:
    """Loss of `run` less the lowest of these dense runs, for every seed that has all of them."""
    return gaps(_of_study(found), run, *(replace(run, variant=name, real=False) for name in dense))


def table(found: Sequence[Outcome], names: Sequence[str] = (*list(ADAM_DENSE)[1:], *ADAM)) -> str:
    """A line for each number of ranks, length and way to train."""
    lines = []
    for workers, length, name in itertools.product(ADAM_WORKERS, LENGTHS, names):
        run = Run(TASK, name, workers, length=length)
        if values := to_dense(found, run):
            better = to_dense(found, run, FIRST_DENSE)
            figures = spread(values, "+.3f"), spread(better, "+.3f"), less(found, run), len(values)
            lines.append([f"N = {run.workers}, {run.steps:,} steps", _named(run.variant), *figures])
    head = ["", "", LOSS, "minus the better of both b1", "bytes sent / dense", "seeds"]
    return markdown(head, lines) if lines else NOTHING


def _named(variant: str) -> str:
    """A variant in the tables, with its density."""
    name = variant.removeprefix("AdamW, ").removeprefix("dgc, ")
    return f"1%{name.removeprefix('dgc')}" if name == "dgc" else f"1%, {name}" if name.startswith("b2") else name


def less(found: Sequence[Outcome], run: Run) -> str:
    """Bytes that a run sends, in those of a dense one."""
    sent = [_traffic(each) for each in found if replace(each.run, seed=run.seed) == run]
    return "all" if run.variant in ADAM_DENSE else f"1/{1 / statistics.mean(sent):.1f}"


def _traffic(each: Outcome) -> float:
    """PowerSGD counts the bytes after its dense steps alone."""
    variant, steps = VARIANTS[each.run.variant], each.run.steps
    if not variant.power_sgd:
        return each.traffic
    return (variant.dense_steps + (steps - variant.dense_steps) * each.traffic) / steps


def matrix(found: Sequence[Outcome], variants: Sequence[str], columns: Sequence[tuple[int, float]]) -> str:
    """A line a variant, a column for each N and length."""
    cells = [[spread(to_dense(found, Run(TASK, name, n, length=x)), "+.3f") for n, x in columns] for name in variants]
    if not any(map(any, cells)):
        return NOTHING
    head = [f"N = {n}, {Run(TASK, DENSE, n, length=x).steps:,} steps" for n, x in columns]
    return markdown([LOSS, *head], [[_named(name), *row] for name, row in zip(variants, cells, strict=True)])


def larger(local: Sequence[Outcome], adam: Sequence[Outcome]) -> str:
    """The larger model: compressed at each step, and of the other study PowerSGD and local steps."""
    lines = []
    for found in (adam, local):
        by_run = {replace(each.run, seed=0): None for each in found if each.run.task == LARGER and each.run.length == 1}
        for run in sorted(by_run, key=lambda run: (list(VARIANTS).index(run.variant), run.workers)):
            values = to_dense(found, run)
            if values and run.variant != DENSE:
                better = spread(to_dense(found, run, FIRST_DENSE), "+.3f")
                name = f"{_named(run.variant)}, N = {run.workers}"
                lines.append([name, spread(values, "+.3f"), better, less(found, run), len(values)])
    return markdown([LOSS, "", "minus the better of both b1", "bytes sent / dense", "seeds"], lines)


def power_sgd(local: Sequence[Outcome], adam: Sequence[Outcome], workers: int = 4) -> str:
    """Bytes of PowerSGD after its dense steps beside density 1%, in words."""
    theirs = [each.traffic for each in local if each.run.task == LARGER and each.run.variant in all_of.POWER_SGD]
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


def _places(found: Sequence[Outcome]) -> list[tuple[str, int, float]]:
    """Task, number of ranks and length of which there are local steps."""
    known = {(each.run.task, each.run.workers, each.run.length) for each in found if each.run.variant in BESIDE}
    return [place for place in itertools.product(ALL_TASKS, WORKERS, LENGTHS) if place in known]


def _rows(found: Sequence[Outcome], place: tuple[str, int, float], names: Sequence[str]) -> list[list[Outcome]]:
    task, workers, length = place
    return paired(found, *(Run(task, name, workers, length=length) for name in (DENSE, *names)))


def _place(run: Run) -> str:
    return f"{ALL_TASKS[run.task].title}, N = {run.workers}, {run.steps:,} steps"


def local_steps(found: Sequence[Outcome]) -> str:
    """A line for each task, number of ranks, length and H of which something was run."""
    lines, found = [], _of_study(found)
    for place, (name, (averaged, steps)) in itertools.product(_places(found), BESIDE.items()):
        if rows := _rows(found, place, (averaged, name)):
            run, later = rows[0][2].run, VARIANTS[name].dense_steps
            config = VARIANTS[name].config(ALL_TASKS[run.task].settings)
            assert config is not None
            title = f"{_place(run)}, H = {steps}, {config.density:.1%}"
            title += f", momentum {config.outer_momentum}" * (name in all_of.LOCAL_GENTLER)
            title += f", after {later} dense steps" * bool(later)
            losses = [[each.loss for each in row] for row in rows]
            differences = zip(*((b - a, c - a, c - b) for a, b, c in losses), strict=True)
            sent = f"{config.density * (run.steps - later) / steps:.1f}"
            traffic = statistics.mean(row[2].traffic for row in rows)
            less = f"{1 / steps / traffic:,.0f}×", f"{1 / traffic:,.0f}×"
            lines.append([title, *(spread(values, "+.3f") for values in differences), len(rows), sent, *less])
    head = [LOSS, "averaged every H", "compressed", "compressed minus averaged", "seeds", "times an element is sent"]
    return markdown([*head, "fewer bytes an exchange", "fewer bytes a step"], lines)


def outer_momentum(found: Sequence[Outcome]) -> str:
    """A line for each place of which whole weights were averaged with outer momentum, beside none and beside ours."""
    lines, found = [], _of_study(found)
    groups = list(zip(LOCAL_STEPS, AVERAGED, all_of.LOCAL_DENSER, strict=True))
    for place, (steps, averaged, denser) in itertools.product(_places(found), groups):
        if rows := _rows(found, place, [averaged, *(f"{averaged}, {name}" for name in all_of.OUTER), denser]):
            differences = zip(*([each.loss - row[0].loss for each in row[1:]] for row in rows), strict=True)
            title = f"{_place(rows[0][0].run)}, H = {steps}"
            lines.append([title, *(spread(values, "+.3f") for values in differences), len(rows)])
    head = [LOSS, "averaged every H", "with Nesterov 0.5", "DiLoCo: Nesterov 0.9, rate 0.7"]
    return markdown([*head, "compressed to 6%, Nesterov 0.5", "seeds"], lines)


def blocks(local: Sequence[Outcome], adam: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page, by marker.

    Args:
        local: of the study that has local steps.
        adam: of the study of compression at each step.
    """
    by_workers = [(workers, LENGTHS[1]) for workers in ADAM_WORKERS]
    return {
        "adam": table(adam),
        "adam-local": table(adam, list(all_of.LOCAL_BETAS)),
        "adam-workers": matrix(adam, (DGC, "AdamW, dgc, 0.3% in 2 bits"), by_workers),
        "adam-lengths": matrix(adam, (DGC, LEAST), [(ADAM_WORKERS[0], length) for length in LENGTHS]),
        "larger": "\n\n".join(filter(None, (larger(local, adam), power_sgd(local, adam)))),
        "local": local_steps(local),
        "outer": outer_momentum(local),
    }


def draw_adamw(found: Sequence[Outcome], file: Path) -> None:
    """The gap over the density, a line for each number of ranks."""
    figure, ((axes,),) = panels(width=5.4)
    for workers, style in zip(WORKERS, ("-", "--"), strict=True):
        points = []
        for name in ADAM:
            config = VARIANTS[name].config(ALL_TASKS[TASK].settings)
            values = to_dense(found, Run(TASK, name, workers, length=LENGTHS[1]))
            if config is not None and values and VARIANTS[name].betas == VARIANTS[DENSE].betas:
                points.append((100 * config.density, *mean_and_deviation(values)))
        if points:
            axes.errorbar(*zip(*points, strict=True), fmt=f"o{style}", markersize=4, capsize=2, label=f"N = {workers}")
            axes.legend(frameon=False, fontsize=8)
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.07, 70)
    axes.set_xticks((0.1, 1, 10), ("0.1%", "1%", "10%"))
    axes.minorticks_off()
    label(axes, x="density (2 bits up to 1%, bfloat16 from 1% on)", y=LOSS)
    save_figure(figure, file)


SHARDED = ("sharded, k", "sharded, 2k", "sharded, 4k")
AUTO_SEED = 700  # the first of its study


def texts() -> dict[str, str]:
    """The generated parts of the page, by marker."""
    (found, adam), kept = _found(), read_results(selection.KEPT)
    made = tables.blocks(found) | _blocks(found) | blocks(found, adam)
    made |= {"vectors": vectors(kept), "gradients": gradients(kept)}
    made |= {"made-by": made_by(found), "quality": tables.by_length(found)}
    made["adam-made-by"] = made_by(adam, runs.ADAM_KEPT) if adam else NOTHING
    return made


def in_short() -> str:
    """README's figures: four ranks, the mean over the seeds, against dense training of the same seed."""
    found, adam = _found()
    long, short = max(LENGTHS), min(LENGTHS)

    def gap(task: str, length: float) -> tuple[float, int]:
        (row,) = tables.rows_of(
            found, lambda run: replace(run, seed=0) == Run(task, "dgc", 4, length=length) and not run.real
        )
        return statistics.mean(tables.GOALS[task].gap(row)), row.run.steps

    def of_adam(run: Run) -> str:
        values, seeds = to_dense(adam, run), ""
        if len(values) < 3:
            seeds = f" (of {len(values)} seed{'s' * (len(values) > 1)})"
        return f"{statistics.mean(values):+.2f} nats{seeds} for {less(adam, run)} of the bytes"

    transformer = Run(TASK, DGC, 4, length=LENGTHS[1])
    coarse, gpt = replace(transformer, variant="AdamW, dgc, 0.3% in 2 bits"), Run("gpt", DGC, 4)
    (images, steps), (lstm, lstm_steps) = gap("images", long), gap("lstm", long)
    text = (
        "In runs that are long enough, yes. On small models, four ranks, three seeds ([all figures](docs/quality.md)), "
        f"against dense training: images with SGD at 0.1% after {steps:,} steps {images:+.1f} points of accuracy; an "
        f"LSTM with SGD at 0.5% after {lstm_steps:,} steps {lstm:+.2f} nats of loss; a Transformer with **AdamW** "
        f"after {transformer.steps:,} steps {of_adam(transformer)} at 1%, {of_adam(coarse)} at 0.3% in 2 bits"
    )
    if to_dense(adam, gpt):
        text += f"; a GPT of 5 M with AdamW after {gpt.steps:,} steps {of_adam(gpt)} at 1%"
        text += f", {of_adam(replace(gpt, variant=coarse.variant))} at 0.3% in 2 bits"
    text += (
        f". SGD runs a tenth as long end behind, by {-gap('images', short)[0]:.1f} points and "
        f"{gap('lstm', short)[0]:.2f} nats. AdamW needs neither dense steps nor a density warm-up "
        "([settings](docs/tuning.md#adam-and-adamw))."
    )
    return "\n".join(textwrap.wrap(text, 150, break_long_words=False, break_on_hyphens=False))


@functools.cache
def _found() -> list[list[Outcome]]:
    """The runs of the study, and those of AdamW, which has a file of its own."""
    return [tables.outcomes(runs.load(file)) for file in (runs.KEPT, runs.ADAM_KEPT)]


def made_by(found: Sequence[Outcome], file: Path = runs.KEPT) -> str:
    """How many runs there are, and with what."""
    used = next(iter(read_results(file).values()))["environment"]  # of all of them, see `runs.complete`
    versions = ", ".join(f"{name} {used[name]}" for name in ("torch", "horovod", "numpy", "python", "dgc-horovod"))
    steps = sum(each.curve[-1][0] for each in found if each.curve)
    seeds = len({each.run.seed for each in found})
    middle = statistics.median(each.run.steps for each in found)
    return (
        f"{len(found)} runs of {seeds} seeds, {steps:,.0f} steps (median {middle:.0f} a run), on {used['processor']}, "
        f"with {versions}."
    )


def draw() -> None:
    """The plots of the page."""
    found, adam = _found()
    plots.draw(found, read_results(selection.KEPT))
    draw_adamw(adam, IMAGES / "quality_adam.svg")


def _exchanges(found: Sequence[Outcome], length: float) -> str:
    """Loss of each exchange less that of dense training of the same seed."""
    lines = []
    for task, (workers, node_size) in itertools.product(TASKS, NODES.items()):
        runs = [Run(task, name, workers, length=length) for name in ("dense", "dgc", *_pairs(node_size))]
        cells = [spread(gaps(found, run, runs[0]), "+.3f") for run in runs[1:]]
        if any(cells):
            lines.append([f"{TASKS[task].title}, N = {workers}, nodes of {node_size}", *cells])
    beside = (part for name in ("nodes", *SHARDED) for part in (name, "flat, same bytes"))
    return markdown(["loss minus dense, nats", "flat", *beside], lines)


def _verdicts(found: Sequence[Outcome], length: float) -> str:
    """Each exchange less the flat one of as many bytes, bold where chance puts it so far from 0 once in 20 times."""
    lines = []
    for task, (workers, node_size) in itertools.product(TASKS, NODES.items()):
        runs = [Run(task, name, workers, length=length) for name in _pairs(node_size)]
        differences = [gaps(found, run, flat) for run, flat in zip(runs[::2], runs[1::2], strict=True)]
        if any(differences):
            bold = ["**" if is_clear(values) else "" for values in differences]
            cells = [f"{b}{spread(values, '+.3f')}{b}" for b, values in zip(bold, differences, strict=True)]
            lines.append([f"{TASKS[task].title}, N = {workers}", *cells])
    return markdown(["loss minus flat of the same bytes, nats", "nodes", *SHARDED], lines)


def _pairs(node_size: int) -> list[str]:
    """Each exchange, and the flat one of as many bytes."""
    return [part for name in (f"nodes of {node_size}", *SHARDED) for part in (name, f"dgc, bytes of {name}")]


def _auto(found: Sequence[Outcome]) -> str:
    """A line a task and length: density, loss and accuracy less those of dense training of the same seed."""
    names = ("dense", *AUTOMATIC, *UNMASKED)
    shown = tables.rows_of(found, lambda run: run.seed >= AUTO_SEED and run.variant in names)
    lines = []
    for row in sorted(shown, key=lambda row: (row.run.task, row.run.steps, row.run.variant)):
        fields = VARIANTS[row.run.variant].fields
        if fields is not None:
            title = f"{TASKS[row.run.task].title}, {row.run.steps:,} steps"
            differences = [spread(row.loss_gap, "+.3f"), spread(row.accuracy_gap, "+.2f")]
            masked = "yes" if fields["factor_masking"] else "no"
            lines.append([title, f"{fields['density']:.1%}", masked, *differences, str(len(row.loss_gap))])
    head = ["N = 4, auto minus dense", "density", "momentum masked", "loss, nats", "accuracy, points", "seeds"]
    return markdown(head, lines)


def _blocks(found: Sequence[Outcome]) -> dict[str, str]:
    lengths = [x for x in LENGTHS[:2] if any(each.run.workers in NODES and each.run.length == x for each in found)]
    many = {
        name: "\n\n".join(f"×{length:g} the steps\n\n{table(found, length)}" for length in lengths)
        for name, table in (("many-workers", _exchanges), ("many-workers-verdicts", _verdicts))
    }
    return {**many, "auto": _auto(found)}


def vectors(kept: Mapping[str, Any]) -> str:
    """The remainder on Gaussian vectors beside the bounds."""
    lines = []
    for row in kept[selection.VECTORS]["rows"]:
        below = 1 - row["k"] / row["numel"]
        left = (row["exact"], below**2, row["gaussian"], row["sampled"], below)
        lines.append([f"{row['k']:,}", *(f"{value:.5f}" for value in left)])
    return markdown(["k of 100,000", "top-k", "(1 - k/d)²", "gaussian", "sampled", "1 - k/d"], lines)


def gradients(kept: Mapping[str, Any]) -> str:
    """The remainder of top-k on gradients and residuals at the moments of a run that were looked at."""
    lines = []
    for name in selection.GRADIENTS:
        found = kept[name]["rows"]
        for tensor in dict.fromkeys(row["tensor"] for row in found):
            mine = where(found, tensor=tensor)
            below = 1 - mine[0]["k"] / mine[0]["numel"]
            left = [f"{row['remainder']:.4f}" for row in mine]
            tails = " ".join(f"{row['kurtosis']:.1f}" for row in mine)
            lines.append([f"{name}, {tensor}", *left, f"{below**2:.4f}", f"{below:.4f}", tails])
    moments = [f"{moment:.0%}" for moment in MOMENTS]
    return markdown(["remainder of top-k", *moments, "(1 - k/d)²", "1 - k/d", "kurtosis"], lines)
