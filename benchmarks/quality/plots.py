"""The plots of docs/quality.md; matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality import tables
from benchmarks.quality.runs import LENGTHS, LONGER, WORKERS
from benchmarks.quality.tables import GOALS, Outcome
from benchmarks.quality.tasks import TASKS
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
}
_CURVES = ("dense", "top-k, no residual", "+ residual (TopK-SGD)", "dgc", "dgc, rule=gaussian")


def draw(found: Sequence[Outcome]) -> None:
    """All of them."""
    simulated = [each for each in found if not each.run.real]
    short = [each for each in simulated if each.run.length == 1 and each.run.workers == 4]
    curves(short, IMAGES / "quality_curves.svg")
    longer(simulated, IMAGES / "quality_longer.svg")


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


def _band(axes: Any, x: Any, least: Any, middle: Any, most: Any, colour: str, name: str) -> None:
    """A line, and lightly all that is between its least and its most."""
    axes.plot(x, middle, color=colour, label=name)
    axes.fill_between(x, least, most, color=colour, alpha=0.2, linewidth=0)
