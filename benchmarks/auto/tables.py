"""What `benchmarks.auto` found, as Markdown and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.auto.turns import AUTO, DENSE, DGC, METHODS, NOTHING
from benchmarks.exchange.tables import NAMES
from benchmarks.report import RESULTS, markdown, save_figure

FILE = RESULTS / "auto.json.xz"
RUN = 2000  # steps of the run that choosing is a part of; shorter ones stay dense
_BY_HAND = (DENSE, DGC)
Cell = Mapping[str, Any]


def medians(cell: Cell) -> dict[str, float]:
    """Milliseconds of a step by method: the median over all steps, of the slower rank of each."""
    return {method: statistics.median(_slower(cell, method)) for method in METHODS}


def _slower(cell: Cell, method: str) -> list[float]:
    return [max(times) for times in zip(*(rank["ms"][method] for rank in cell["ranks"]), strict=True)]


def of_the_best(cell: Cell, best: str) -> tuple[float, float, float]:
    """Time of a step of auto in that of `best` of the same turn: the median of pairs, and the deciles around it."""
    pairs = [one / other for one, other in zip(_slower(cell, AUTO), _slower(cell, best), strict=True)]
    deciles = statistics.quantiles(pairs, n=10)
    return statistics.median(pairs), deciles[0], deciles[-1]


def whole_run(cell: Cell) -> float:
    """Time of `RUN` steps of auto, those of its choice as they were and the others at their median, over dense ones."""
    steps = [max(times) for times in zip(*(rank["choosing_ms"] for rank in cell["ranks"]), strict=True)]
    found = medians(cell)
    return (sum(steps) + (RUN - len(steps)) * found[AUTO]) / (RUN * found[DENSE])


def table(kept: Mapping[str, Cell]) -> str:
    """A line a cell."""
    lines = []
    for cell in kept.values():
        found = medians(cell)
        best = min(_BY_HAND, key=found.__getitem__)
        ratio, low, high = of_the_best(cell, best)
        lines.append(
            [
                f"{cell['model']}, {NAMES[cell['rate']]}",
                *(f"{found[method]:,.1f}" for method in (NOTHING, *_BY_HAND)),
                f"{found[AUTO]:,.1f}",
                str(cell["ranks"][0]["mode"]),
                f"{ratio:.2f}× {best}",
                f"{low:.2f}–{high:.2f}",
                f"{whole_run(cell):.2f}×",
            ]
        )
    head = [
        "ms a step",
        NOTHING,
        *_BY_HAND,
        AUTO,
        "it takes",
        "of the best by hand",
        "80% of pairs",
        f"{RUN} steps, of dense",
    ]
    return markdown(head, lines)


def draw(kept: Mapping[str, Cell], file: Path) -> None:
    """Time of a step by method over that of the best by hand, a group of bars a cell."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    shown = (*_BY_HAND, AUTO)
    for i, (method, color) in enumerate(zip(shown, ("0.6", "C0", "C2"), strict=True)):
        heights = []
        for cell in kept.values():
            found = medians(cell)
            heights.append(found[method] / min(found[name] for name in _BY_HAND))
        axes.bar([x + 0.25 * (i - 1) for x in range(len(heights))], heights, 0.25, label=method, color=color)
    names = [f"{cell['model'].split(',')[0]}\n{NAMES[cell['rate']]}" for cell in kept.values()]
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_yscale("log")
    axes.set_ylabel("time of a step, of the best by hand")
    axes.legend(frameon=False, fontsize=8, ncols=3)
    save_figure(figure, file)
