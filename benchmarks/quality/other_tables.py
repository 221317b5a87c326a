"""Exchanges of many workers, runs at the density that ``auto`` takes, and selection, as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality.analysis import Outcome, gaps, is_clear, rows
from benchmarks.quality.runs import LENGTHS, NODES
from benchmarks.quality.selection import MOMENTS
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import AUTOMATIC, UNMASKED, VARIANTS
from benchmarks.report import markdown, spread

SHARDED = ("sharded, k", "sharded, 2k", "sharded, 4k")
AUTO_SEED = 700  # the first of its study


def exchanges(found: Sequence[Outcome], length: float) -> str:
    """Loss of each exchange less that of dense training of the same seed."""
    lines = []
    for task, (workers, node_size) in itertools.product(TASKS, NODES.items()):
        runs = [Run(task, name, workers, length=length) for name in ("dense", "dgc", *_pairs(node_size))]
        cells = [spread(gaps(found, run, runs[0]), "+.3f") for run in runs[1:]]
        if any(cells):
            lines.append([f"{TASKS[task].title}, N = {workers}, nodes of {node_size}", *cells])
    beside = (part for name in ("nodes", *SHARDED) for part in (name, "flat, same bytes"))
    return markdown(["loss minus dense, nats", "flat", *beside], lines)


def verdicts(found: Sequence[Outcome], length: float) -> str:
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


def auto(found: Sequence[Outcome]) -> str:
    """A line a task and length: density, loss and accuracy less those of dense training of the same seed."""
    names = ("dense", *AUTOMATIC, *UNMASKED)
    shown = rows(found, lambda run: run.seed >= AUTO_SEED and run.variant in names)
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


def blocks(found: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page, by marker."""
    lengths = [x for x in LENGTHS[:2] if any(each.run.workers in NODES and each.run.length == x for each in found)]
    many = {
        name: "\n\n".join(f"×{length:g} the steps\n\n{table(found, length)}" for length in lengths)
        for name, table in (("many-workers", exchanges), ("many-workers-verdicts", verdicts))
    }
    return {**many, "auto": auto(found)}


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
