"""The figures of the study as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.quality import analysis
from benchmarks.quality.analysis import Outcome, Row
from benchmarks.quality.runs import LENGTHS, WORKERS, Results
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import ABLATION, CHOICES, OPTIMIZERS, WITHOUT
from benchmarks.report import markdown

_ENDS = (min, statistics.mean, max)
GOALS = {"images": ("accuracy_gap", 0.3), "lstm": ("loss_gap", 0.02)}  # of the longest runs, to dense


def every_run(results: Results) -> str:
    """Every run that is kept, a table a task, number of ranks and length."""
    found = analysis.outcomes(results)
    places = dict.fromkeys((each.run.task, each.run.workers, each.run.length, each.run.real) for each in found)
    text = []
    for place in sorted(places):
        task, workers, length, real = place
        by = ", Horovod's ranks" if real else ""
        rows = analysis.rows(found, lambda run, place=place: (run.task, run.workers, run.length, run.real) == place)
        text.append(f"### {TASKS[task].title}, N = {workers}, length ×{length:g}{by}\n\n{_rows(rows)}")
    return "\n\n".join(text)


def _rows(rows: Iterable[Row]) -> str:
    head = ["", "test loss", "accuracy, %", "loss less dense's", "accuracy less dense's", "bytes sent"]
    return markdown(head, ([row.run.variant, *_cells(row)] for row in rows))


def _cells(row: Row) -> list[str]:
    return [
        spread(row.loss, ".3f"),
        spread(row.accuracy, ".2f"),
        spread(row.loss_gap, "+.3f"),
        spread(row.accuracy_gap, "+.2f"),
        f"1/{1 / row.traffic:.0f}" if row.traffic < 1 else "all",
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation over seeds, of those that did not diverge, and how many did."""
    sound = [value for value in values if not math.isinf(value)]
    if len(sound) < len(values):
        return f"{len(values) - len(sound)} of {len(values)} diverged"
    if not sound:
        return ""
    deviation = f" ± {statistics.stdev(sound):{form[1:] if form[0] == '+' else form}}" if len(sound) > 1 else ""
    return f"{statistics.mean(sound):{form}}{deviation}"


def ablation(found: Sequence[Outcome], workers: int) -> str:
    """Loss and accuracy of each part of DGC, a column a task."""
    return _by_task(found, workers, (*ABLATION, *WITHOUT))


def choices(found: Sequence[Outcome], workers: int) -> str:
    """The same of rules, codecs, scopes and densities."""
    return _by_task(found, workers, ("dense", *CHOICES))


def _by_task(found: Sequence[Outcome], workers: int, variants: Sequence[str]) -> str:
    mine = [each for each in found if (each.run.workers, each.run.length, each.run.real) == (workers, 1.0, False)]
    rows = {(row.run.task, row.run.variant): row for row in analysis.rows(mine, lambda run: run.variant in variants)}
    head = [f"N = {workers}"]
    for task in TASKS.values():
        head += [f"{task.title}: loss", "accuracy, %"]
    lines = []
    for variant in variants:
        line = [variant]
        for task in TASKS:
            row = rows.get((task, variant))
            shown = [spread(row.loss, ".3f"), spread(row.accuracy, ".2f")] if row else ["", ""]
            line += [shown[0], ""] if "diverged" in shown[0] else shown
        lines.append(line)
    return markdown(head, lines)


def order(found: Sequence[Outcome]) -> str:
    """Which steps of the ablation are as published."""
    lines = []
    for task in TASKS:
        for step in analysis.differences(found, task):
            n = len(step.losses)
            shown = [spread(step.losses, "+.3f"), spread(step.accuracies, "+.2f")]
            if step.diverged:
                shown = ["", ""]
            lines.append([TASKS[task].title, step.after, *shown, n, step.verdict])
    return markdown(["", "what is added", "loss changes by", "accuracy by", "pairs", "verdict"], lines)


def longer(found: Sequence[Outcome]) -> str:
    """The gap to dense over the length of the run, and whether the goal is met at the longest."""
    lines = []
    for task, (name, most) in GOALS.items():
        for workers in WORKERS:
            mine = analysis.rows(
                found, lambda run, t=task, n=workers: (run.task, run.workers, run.real) == (t, n, False)
            )
            for variant in dict.fromkeys(row.run.variant for row in mine if row.run.length == LENGTHS[-1]):
                if variant != "dense":
                    of_length = {row.run.length: row for row in mine if row.run.variant == variant}
                    gaps = [getattr(of_length[each], name) if each in of_length else [] for each in LENGTHS]
                    form = "+.2f" if name == "accuracy_gap" else "+.3f"
                    lost = statistics.mean(gaps[-1]) * (-1 if name == "accuracy_gap" else 1)
                    goal = f"{most:g}: {'met' if lost <= most else 'MISSED'}"
                    unit = "points" if name == "accuracy_gap" else "nats"
                    line = [f"{TASKS[task].title}, N = {workers}", variant, unit, *(spread(gap, form) for gap in gaps)]
                    lines.append([*line, goal])
    head = ["less dense's", "", "", *(f"×{length:g}" for length in LENGTHS), "at most, longest"]
    return markdown(head, lines)


def equal_traffic(found: Sequence[Outcome]) -> str:
    """What changes against the defaults, paired by seed and ranks, beside what is sent; all tasks."""
    lines = []
    for variant in CHOICES:
        line = [variant]
        for task in TASKS:
            change = analysis.difference(found, task, "dgc", variant)
            sent = analysis.sent(found, task, variant) / analysis.sent(found, task, "dgc") if change.losses else 0
            sign = "" if change.clear else " (noise)"
            shown = "diverges" if change.diverged else f"{spread(change.losses, '+.3f')}{sign}"
            line += [shown if change.losses else "", f"{sent:.2f}×" if change.losses else ""]
        if variant != "dgc":
            lines.append(line)
    head = ["against `.dgc()`"]
    for task in TASKS.values():
        head += [f"{task.title}: loss", "bytes"]
    return markdown(head, lines)


def optimizers(found: Sequence[Outcome]) -> str:
    """Other optimizers, on the Transformer."""
    kept = (*OPTIMIZERS, "dense", "dgc", "topk (TopK-SGD)")
    return _rows(
        analysis.rows(
            found, lambda run: (run.task, run.workers) == ("transformer", 4) and not run.real and run.variant in kept
        )
    )


def real(found: Sequence[Outcome]) -> str:
    """Horovod's ranks beside simulated ones, the same run."""
    by_run = {each.run: each for each in found}
    lines = []
    for run, each in by_run.items():
        twin = by_run.get(Run(**{**vars(run), "real": False}))
        if run.real and twin:
            name = f"{TASKS[run.task].title}, N = {run.workers}, {run.variant}"
            same = sum(a == b for a, b in zip(each.curve, twin.curve, strict=False))
            equal = f"{same} of {len(each.curve)}"
            lines.append(
                [name, f"{each.loss:.4f}", f"{twin.loss:.4f}", f"{each.accuracy:.2f}", f"{twin.accuracy:.2f}", equal]
            )
    head = ["", "loss, Horovod", "simulated", "accuracy, Horovod", "simulated", "equal points of the curve"]
    return markdown(head, lines)


def counts(found: Sequence[Outcome]) -> str:
    """Selected elements in k: over all steps of all runs of a variant."""
    lines = []
    for variant in ("dgc, rule=gaussian", "gaussian (GaussianK-SGD)", "dgc, rule=sampled", "dgc"):
        mine = [each for each in found if each.run.variant == variant and each.selected and not each.run.real]
        if mine:
            parts = [part for each in mine for part in each.selected]
            steps = sum(each.run.steps for each in mine)
            mean = statistics.mean(part[1] for part in parts)
            lines.append(
                [
                    variant,
                    len(mine),
                    f"{steps:,}",
                    f"{min(p[0] for p in parts):.3f}",
                    f"{mean:.3f}",
                    f"{max(p[2] for p in parts):.3f}",
                ]
            )
    return markdown(["selected, in k", "runs", "steps", "least", "mean", "most"], lines)


def vectors(rows: Sequence[dict[str, Any]]) -> str:
    """The remainder on Gaussian vectors beside the bounds."""
    lines = []
    for row in rows:
        kept = 1 - row["k"] / row["numel"]
        found = (row["exact"], kept**2, row["gaussian"], row["sampled"], row["random"], kept)
        lines.append([f"{row['k']:,}", *(f"{value:.5f}" for value in found)])
    return markdown(["k of 100,000", "top-k", "(1 - k/d)²", "gaussian", "sampled", "random", "1 - k/d"], lines)


def gradients(kept: dict[str, list[dict[str, Any]]]) -> str:
    """What top-k leaves of gradients and residuals at the moments of a run that were looked at."""
    lines = []
    for name, rows in kept.items():
        for tensor in dict.fromkeys(row["tensor"] for row in rows):
            mine = [row for row in rows if row["tensor"] == tensor]
            below = 1 - mine[0]["k"] / mine[0]["numel"]
            shown = [f"{row['remainder']:.4f}" for row in mine]
            tails = " ".join(f"{row['kurtosis']:.1f}" for row in mine)
            lines.append([f"{name}, {tensor}", *shown, f"{below**2:.4f}", f"{below:.4f}", tails])
    moments = [f"{share:.0%}" for share in (0, 0.02, 0.1, 0.5, 1)]
    return markdown(["remainder of top-k", *moments, "(1 - k/d)²", "1 - k/d", "kurtosis"], lines)
