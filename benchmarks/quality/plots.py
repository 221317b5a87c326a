"""The plots of docs/quality.md; matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality import tables
from benchmarks.quality.runs import LENGTHS, LONGER, WORKERS
from benchmarks.quality.selection import BINS, TRAINED, VECTORS, WIDEST
from benchmarks.quality.tables import COUNTED, GOALS, Outcome
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.variants import ABLATION, CHOICES, WITHOUT
from benchmarks.report import IMAGES, label, mean_and_deviation, save_figure
from benchmarks.report import panels as make_panels

COLOURS = {
    "dense": "#444444",
    "top-k, no residual": "#cc79a7",
    "+ residual (TopK-SGD)": "#d55e00",
    "topk (TopK-SGD)": "#d55e00",
    "dgc": "#0072b2",
    "dgc, density 0.1%": "#8c5fbf",
    "dgc, rule=gaussian": "#009e73",
    "gaussian (GaussianK-SGD)": "#e69f00",
}
_CURVES = ("dense", "top-k, no residual", "+ residual (TopK-SGD)", "dgc", "dgc, rule=gaussian")


def draw(found: Sequence[Outcome], kept: Mapping[str, Any]) -> None:
    """All of them.

    Args:
        found: the runs.
        kept: of the selection study.
    """
    simulated = [each for each in found if not each.run.real]
    short = [each for each in simulated if each.run.length == 1]
    gaps(short, IMAGES / "quality_gaps.svg")
    curves([each for each in short if each.run.workers == 4], IMAGES / "quality_curves.svg")
    longer(simulated, IMAGES / "quality_longer.svg")
    counts(short, IMAGES / "quality_counts.svg")
    remainders(kept[VECTORS]["rows"], IMAGES / "quality_remainders.svg")
    histograms(kept, "images", IMAGES / "quality_histograms_images.png")
    histograms(kept, "lstm", IMAGES / "quality_histograms_lstm.png")


def gaps(found: Sequence[Outcome], file: Path) -> None:
    """Test loss less that of dense training: a line a variant, a panel a task, mean ± sd over seeds."""
    names = [name for name in (*ABLATION, *WITHOUT, *CHOICES) if name != "dense"]
    figure, panels = make_panels(len(TASKS), width=3.6, height=7, sharey=True)
    for axes, task in zip(panels[0], TASKS, strict=True):
        rows = {(row.run.variant, row.run.workers): row for row in tables.rows_of(found, task=task)}
        for workers, colour, shift in zip(WORKERS, ("#0072b2", "#e69f00"), (-0.15, 0.15), strict=True):
            points = []
            for place, name in enumerate(names):
                row = rows.get((name, workers))
                gap = [value for value in row.loss_gap if math.isfinite(value)] if row else []
                if row and row.diverged:
                    right = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center", "fontsize": 7}
                    text = f"{row.diverged} of {len(row.loss)} diverge"
                    axes.text(0.98, place + 2 * shift, text, color=colour, **right)
                elif gap:
                    points.append((place + shift, *mean_and_deviation(gap)))
            places, means, deviations = zip(*points, strict=True) if points else ((), (), ())
            style = {"fmt": "o", "markersize": 4, "color": colour, "label": f"N = {workers}"}
            axes.errorbar(means, places, xerr=deviations, **style)
        axes.axvline(0, color="#444444", linewidth=1)
        axes.axhline(len(ABLATION) + len(WITHOUT) - 1.5, color="0.8", linewidth=1)
        axes.set_title(TASKS[task].title, fontsize=10)
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xlim(-0.12, 2)
        axes.set_xticks((-0.1, 0, 0.1, 0.3, 1), ("-0.1", "0", "0.1", "0.3", "1"))
        axes.grid(alpha=0.3, axis="x")
    panels[0][0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0][0].invert_yaxis()
    panels[0][1].set_xlabel("test loss less that of dense training, nats (linear up to 0.1)")
    panels[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, file)


def curves(found: Sequence[Outcome], file: Path) -> None:
    """Test loss over the steps, mean of the seeds and their range."""
    figure, panels = make_panels(len(TASKS))
    for axes, task in zip(panels[0], TASKS, strict=True):
        for variant in _CURVES:
            mine = [each for each in found if (each.run.task, each.run.variant) == (task, variant)]
            curves = np.array([each.curve for each in mine if math.isfinite(each.loss)])
            if len(curves):
                steps, losses = curves[0, :, 0], curves[:, :, 1]
                _band(axes, steps, losses.min(0), losses.mean(0), losses.max(0), COLOURS[variant], variant)
        label(axes, TASKS[task].title, x="steps")
        last = [each.loss for each in found if each.run.task == task and math.isfinite(each.loss)]
        axes.set_ylim(min(last, default=0.0) - 0.1, min(last, default=0.0) + 1.6)
    panels[0][0].set_ylabel("test loss, nats")
    panels[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, file)


def longer(found: Sequence[Outcome], file: Path) -> None:
    """The gap to dense over the length of the run; the goal is dotted."""
    figure, panels = make_panels(len(GOALS), height=4)
    for axes, (task, goal) in zip(panels[0], GOALS.items(), strict=True):
        for workers, line in zip(WORKERS, ("-", "--"), strict=True):
            for variant in LONGER[1:]:
                rows = {
                    row.run.length: row for row in tables.rows_of(found, task=task, workers=workers, variant=variant)
                }
                gaps = [(length, goal.gap(rows[length])) for length in LENGTHS if length in rows]
                points = [(length, *mean_and_deviation(gap)) for length, gap in gaps if all(map(math.isfinite, gap))]
                if points:
                    style = {"color": COLOURS[variant], "linestyle": line, "marker": "o", "markersize": 4, "capsize": 2}
                    axes.errorbar(*zip(*points, strict=True), label=f"{variant}, N = {workers}", **style)
        axes.axhline(0, color="#444444", linewidth=1)
        limit = -goal.most if goal.figure == "accuracy" else goal.most
        axes.axhline(limit, color="#444444", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xticks(LENGTHS, [f"×{length:g}" for length in LENGTHS])
        axes.minorticks_off()
        label(axes, TASKS[task].title, x="length of the run", y=f"{goal.name}, less dense's own")
    lines = panels[0][-1].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=len(WORKERS), frameon=False, fontsize=8)
    save_figure(figure, file)


def counts(found: Sequence[Outcome], file: Path) -> None:
    """Selected elements in k over the run: the mean, and the least and the most of any step of any seed."""
    figure, panels = make_panels(len(TASKS), sharey=True)
    for axes, task in zip(panels[0], TASKS, strict=True):
        for variant in COUNTED[1:]:
            mine = [each for each in found if (each.run.task, each.run.variant) == (task, variant)]
            mine = [each for each in mine if math.isfinite(each.loss)]
            if mine:
                share = [100 * point[0] / mine[0].run.steps for point in mine[0].curve]
                least, middle, most = np.moveaxis([each.selected for each in mine], 2, 0)
                colour = COLOURS.get(variant, "#999999")
                _band(axes, share, least.min(0), middle.mean(0), most.max(0), colour, variant)
        for bound in (0.8, 1.0):
            axes.axhline(bound, color="#444444", linestyle=":", linewidth=1)
        axes.set_ylim(0.6, 1.35)
        label(axes, TASKS[task].title, x="% of the run")
    panels[0][0].set_ylabel("selected elements, in k")
    panels[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, file)


def _band(axes: Any, x: Any, least: Any, middle: Any, most: Any, colour: str, name: str) -> None:
    """A line, and lightly all that is between its least and its most."""
    axes.plot(x, middle, color=colour, label=name)
    axes.fill_between(x, least, most, color=colour, alpha=0.2, linewidth=0)


def remainders(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Remainder of each rule on Gaussian vectors, beside the bounds."""
    figure, panels = make_panels(1, width=5.4)
    axes, share = panels[0][0], np.array([row["k"] / row["numel"] for row in rows])
    for rule, colour in (("exact", "#0072b2"), ("gaussian", "#009e73")):
        name = "top-k" if rule == "exact" else rule
        ring = {"markersize": 7, "markerfacecolor": "none"} if rule == "gaussian" else {"markersize": 4}
        axes.plot(share, [row[rule] for row in rows], "o", color=colour, label=name, **ring)
    between = np.linspace(share[0], share[-1], 200)
    axes.plot(between, 1 - between, color="#444444", linestyle="--", linewidth=1, label="1 - k/d")
    axes.plot(between, (1 - between) ** 2, color="#444444", linestyle=":", linewidth=1.4, label="(1 - k/d)²")
    label(axes, x="k/d, d = 100,000", y="remainder, ‖x - C(x)‖² / ‖x‖²")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, file)


def histograms(kept: Mapping[str, Any], task: str, file: Path) -> None:
    """Of what is selected from, a column a matrix and a row a way to train, over a run; a Gaussian is dotted."""
    mine = {variant: kept[f"{task}, {variant}"]["rows"] for variant in TRAINED}
    tensors = list(dict.fromkeys(row["tensor"] for rows in mine.values() for row in rows))
    figure, panels = make_panels(len(tensors), len(mine), width=3.0, height=2.3, sharex=True, sharey=True)
    edges = np.linspace(-WIDEST, WIDEST, BINS + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    gaussian = np.exp(-(middle**2) / 2) / math.sqrt(2 * math.pi)
    for line, (variant, rows) in zip(panels, mine.items(), strict=True):
        for axes, tensor in zip(line, tensors, strict=True):
            found = [row for row in rows if row["tensor"] == tensor]
            for row, shade in zip(found, np.linspace(0.15, 0.9, len(found)), strict=True):
                density = np.array(row["histogram"]) / row["numel"] / width
                style = {"color": (0.0, 0.25 + 0.45 * (1 - shade), 0.75, 0.35 + 0.65 * shade), "linewidth": 1}
                axes.semilogy(middle, np.where(density > 0, density, np.nan), label=f"step {row['step']}", **style)
            axes.semilogy(middle, gaussian, color="#444444", linestyle=":", linewidth=1)
            axes.set_ylim(1e-5, 3)
            axes.minorticks_off()
            axes.set_title(f"{variant}\n{tensor}", fontsize=8)
            axes.grid(alpha=0.3)
        line[0].set_ylabel("density", fontsize=8)
    panels[0][-1].legend(frameon=False, fontsize=6)
    for axes in panels[-1]:
        axes.set_xlabel("standard deviations", fontsize=8)
    save_figure(figure, file)
