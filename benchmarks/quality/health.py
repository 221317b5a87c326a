"""Which residual norms, staleness and overlap runs have whose quality is known: the range that advice goes by.

``python -m benchmarks.quality.health``: simulated runs, every fifth step of rank 0 after the density warm-up looked at.
A quarter of an hour on one core; the table goes into docs/tuning.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.quality.training import Run, train
from benchmarks.report import markdown, write_into_page
from dgc_horovod.advice import LOOKS
from dgc_horovod.schedule import density_at

# after its warm-up not behind dense training (docs/quality.md), and behind it or worse
SOUND = [
    Run("images", "dgc", 4, length=4),
    Run("images", "dgc", 8, length=4),
    Run("lstm", "dgc", 4, length=4),
    Run("lstm", "dgc", 8, length=4),
    Run("transformer", "dgc", 4),
    Run("transformer", "dgc", 8),
]
BEHIND = [
    Run("lstm", "dgc, density 0.1%", 4, length=4),
    Run("lstm", "DGC without clipping", 4),
    Run("lstm", "+ momentum correction", 4),
    Run("transformer", "DGC without masking", 4),
    Run("images", "dgc, rule=random", 4),
]
_EVERY = 5  # steps
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"
_FIGURES: dict[str, Callable[[dict[str, float], float], float]] = {
    "residual / gradient": lambda figures, density: figures["residual_ratio"],
    "the same × √density": lambda figures, density: figures["residual_ratio"] * density**0.5,
    "staleness, mean": lambda figures, density: figures["staleness_mean"],
    "staleness, 99%, × density": lambda figures, density: figures["staleness_99"] * density,
    "overlap": lambda figures, density: figures.get("overlap", np.nan),
}


def looked_at(run: Run) -> tuple[dict[str, Any], np.ndarray]:
    """Do a run; what came of it, and a row of `_FIGURES` for each step that was looked at after the warm-up."""
    rows: list[list[float]] = []

    def watch(ranks: Any, step: int, loss: float) -> None:
        exchange = ranks.exchange
        counts, config = exchange.counts, exchange.config
        density = density_at(config.final_density, config.warmup, step - 1)
        exchange.diagnostics.next_look = 0.0 if step % _EVERY == 0 else np.inf
        if counts.figures.get("residual_ratio") and density == config.final_density:
            rows.append([figure(counts.figures, density) for figure in _FIGURES.values()])
        counts.figures = {}

    return train(run, watch=watch), np.array(rows)


def cell(values: np.ndarray) -> str:
    """The median of a figure, and in brackets what it would have to pass for a warning: as many looks in a row."""
    in_a_row = sliding_window_view(values, min(LOOKS, len(values)))
    return f"{np.median(values):.3g} ({in_a_row.min(axis=1).max():.3g})"


def main() -> None:
    """Do all runs, and write the table."""
    lines: list[list[str]] = []
    for title, runs in (("", SOUND), ("**behind**: ", BEHIND)):
        for run in runs:
            found, rows = looked_at(run)
            cells = [cell(column) for column in rows.T] if len(rows) else ["-"] * len(_FIGURES)
            name = f"{title}{run.task}, {run.variant}, N = {run.workers}, {run.steps} steps"
            lines.append([name + " (diverged)" * found["diverged"], *cells])
            print(*lines[-1], sep=" | ", flush=True)
    write_into_page(_PAGE, "health", markdown(["", *_FIGURES], lines))


if __name__ == "__main__":
    main()
