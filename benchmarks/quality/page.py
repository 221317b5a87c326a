"""The tables and plots of docs/quality.md, from the JSON of the study."""

from __future__ import annotations

import functools
import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.quality import adamw_tables, analysis, plots, runs, selection, tables
from benchmarks.quality.analysis import Outcome, gaps, is_clear
from benchmarks.quality.runs import LENGTHS, NODES
from benchmarks.quality.selection import MOMENTS
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import AUTOMATIC, UNMASKED, VARIANTS
from benchmarks.report import IMAGES, markdown, read_results, spread

SHARDED = ("sharded, k", "sharded, 2k", "sharded, 4k")
AUTO_SEED = 700  # the first of its study


def texts() -> dict[str, str]:
    """The generated parts of the page, by marker."""
    (found, adam), kept = _found(), selection.load()
    made = tables.blocks(found) | _blocks(found) | adamw_tables.blocks(found, adam)
    made |= {"vectors": vectors(kept["vectors"]), "gradients": gradients(kept["gradients"])}
    made |= {"made-by": made_by(found), "quality": tables.by_length(found)}
    made["adam-made-by"] = made_by(adam, runs.ADAM_KEPT) if adam else adamw_tables.NOTHING
    return made


def in_short() -> str:
    """README's figures: four ranks, the mean over the seeds, against dense training of the same seed."""
    found, adam = _found()
    long, short = max(LENGTHS), min(LENGTHS)

    def gap(task: str, length: float) -> tuple[float, int]:
        (row,) = analysis.rows(
            found, lambda run: replace(run, seed=0) == Run(task, "dgc", 4, length=length) and not run.real
        )
        return statistics.mean(tables.GOALS[task].gap(row)), row.run.steps

    def of_adam(run: Run) -> str:
        values, seeds = adamw_tables.to_dense(adam, run), ""
        if len(values) < 3:
            seeds = f" (of {len(values)} seed{'s' * (len(values) > 1)})"
        return f"{statistics.mean(values):+.2f} nats{seeds} for {adamw_tables.less(adam, run)} of the bytes"

    transformer = Run(adamw_tables.TASK, adamw_tables.DGC, 4, length=LENGTHS[1])
    coarse, gpt = replace(transformer, variant="AdamW, dgc, 0.3% in 2 bits"), Run("gpt", adamw_tables.DGC, 4)
    (images, steps), (lstm, lstm_steps) = gap("images", long), gap("lstm", long)
    text = (
        "In runs that are long enough, yes. On small models, four ranks, three seeds ([all figures](docs/quality.md)), "
        f"against dense training: images with SGD at 0.1% after {steps:,} steps {images:+.1f} points of accuracy; an "
        f"LSTM with SGD at 0.5% after {lstm_steps:,} steps {lstm:+.2f} nats of loss; a Transformer with **AdamW** "
        f"after {transformer.steps:,} steps {of_adam(transformer)} at 1%, {of_adam(coarse)} at 0.3% with values in 2 "
        "bits"
    )
    if adamw_tables.to_dense(adam, gpt):
        text += f"; a GPT of 5 M with AdamW after {gpt.steps:,} steps {of_adam(gpt)} at 1%"
        text += f", {of_adam(replace(gpt, variant=coarse.variant))} at 0.3%"
    text += (
        f". SGD runs a tenth as long end behind, by {-gap('images', short)[0]:.1f} points and "
        f"{gap('lstm', short)[0]:.2f} nats. AdamW needs neither dense steps nor a warm-up "
        "([settings](docs/tuning.md#adam-and-adamw))."
    )
    return "\n".join(textwrap.wrap(text, 150, break_long_words=False, break_on_hyphens=False))


@functools.cache
def _found() -> list[list[Outcome]]:
    """The runs of the study, and those of AdamW, which has a file of its own."""
    return [analysis.outcomes(runs.load(file)) for file in (runs.KEPT, runs.ADAM_KEPT)]


def made_by(found: Sequence[Outcome], file: Path = runs.KEPT) -> str:
    """How many runs there are, and with what."""
    used = read_results(file)["environment"]  # of all of them, see `runs.complete`
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
    plots.draw(found, selection.load())
    adamw_tables.draw(adam, IMAGES / "quality_adam.svg")


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
    shown = analysis.rows(found, lambda run: run.seed >= AUTO_SEED and run.variant in names)
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


def vectors(kept: Sequence[Mapping[str, Any]]) -> str:
    """The remainder on Gaussian vectors beside the bounds."""
    lines = []
    for row in kept:
        below = 1 - row["k"] / row["numel"]
        left = (row["exact"], below**2, row["gaussian"], row["sampled"], row["random"], below)
        lines.append([f"{row['k']:,}", *(f"{value:.5f}" for value in left)])
    return markdown(["k of 100,000", "top-k", "(1 - k/d)²", "gaussian", "sampled", "random", "1 - k/d"], lines)


def gradients(kept: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The remainder of top-k on gradients and residuals at the moments of a run that were looked at."""
    lines = []
    for name, found in kept.items():
        for tensor in dict.fromkeys(row["tensor"] for row in found):
            mine = [row for row in found if row["tensor"] == tensor]
            below = 1 - mine[0]["k"] / mine[0]["numel"]
            left = [f"{row['remainder']:.4f}" for row in mine]
            tails = " ".join(f"{row['kurtosis']:.1f}" for row in mine)
            lines.append([f"{name}, {tensor}", *left, f"{below**2:.4f}", f"{below:.4f}", tails])
    moments = [f"{moment:.0%}" for moment in MOMENTS]
    return markdown(["remainder of top-k", *moments, "(1 - k/d)²", "1 - k/d", "kurtosis"], lines)
