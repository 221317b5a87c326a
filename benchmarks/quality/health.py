"""Residual norms, staleness and overlap of runs whose quality is known: the range that advice goes by.

Simulated runs; every fifth step of rank 0 after the density warm-up is looked at. A quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.command import Benchmark
from benchmarks.quality.training import Run, train
from benchmarks.report import RESULTS, complete, markdown, read_results
from dgc_horovod.advice import LOOKS
from dgc_horovod.config import density_at

# after its warm-up not behind dense training (docs/quality.md), and behind it or worse
SOUND = [Run(task, "dgc", workers, length=4) for task in ("images", "lstm") for workers in (4, 8)]
SOUND += [Run("transformer", "dgc", workers) for workers in (4, 8)]
BEHIND = [
    Run("lstm", "dgc, density 0.1%", 4, length=4),
    Run("lstm", "DGC without clipping", 4),
    Run("lstm", "+ momentum correction", 4),
    Run("transformer", "DGC without masking", 4),
]
KEPT = RESULTS / "quality-health.json"
_EVERY = 5  # steps
_FIGURES: dict[str, Callable[[dict[str, float], float], float]] = {
    "residual / gradient": lambda figures, density: figures["residual_ratio"],
    "the same × √density": lambda figures, density: figures["residual_ratio"] * density**0.5,
    "staleness, mean": lambda figures, density: figures["staleness_mean"],
    "staleness, 99%, × density": lambda figures, density: figures["staleness_99"] * density,
    "overlap": lambda figures, density: figures.get("overlap", np.nan),
}


def looked_at(run: Run) -> dict[str, Any]:
    """Do a run; whether it diverged, and `described` the steps that were looked at after the warm-up."""
    rows: list[list[float]] = []

    def watch(ranks: Any, step: int, loss: float) -> None:
        exchange = ranks.exchange
        counts, config = exchange.counts, exchange.config
        density = density_at(config.density, config.warmup, step - 1)
        exchange.meters.diagnostics.next_look = 0.0 if step % _EVERY == 0 else np.inf
        if counts.figures.get("residual_ratio") and density == config.density:
            rows.append([figure(counts.figures, density) for figure in _FIGURES.values()])
        counts.figures = {}

    diverged = train(run, watch=watch)["diverged"]
    return {"diverged": diverged, "figures": described(np.array(rows)) if rows else {}}


def described(rows: np.ndarray) -> dict[str, list[float]]:
    """Of each figure the median, and the highest that as many looks in a row as a warning takes stay at."""
    found = {}
    for name, values in zip(_FIGURES, rows.T, strict=True):
        if len(values := values[np.isfinite(values)]):
            in_a_row = sliding_window_view(values, min(LOOKS, len(values)))
            found[name] = [float(np.median(values)), float(in_a_row.min(axis=1).max())]
    return found


def table(kept: Mapping[str, Any]) -> str:
    """A line for each run, a column for each figure."""
    lines = []
    for run in (run for run in (*SOUND, *BEHIND) if run.key in kept):
        found, behind = kept[run.key], "" if run in SOUND else "**behind**: "
        name = f"{behind}{run.task}, {run.variant}, N = {run.workers}, {run.steps} steps"
        figures = [found["figures"].get(figure) for figure in _FIGURES]
        cells = [f"{each[0]:.3g} ({each[1]:.3g})" if each else "-" for each in figures]
        lines.append([name + " (diverged)" * found["diverged"], *cells])
    return markdown(["", *_FIGURES], lines)


def measure(options: argparse.Namespace) -> None:
    """Do the runs that are not kept yet."""
    complete(options.file, {run.key: partial(looked_at, run) for run in (*SOUND, *BEHIND)})


COMMAND = Benchmark("quality.health", __doc__ or "", measure, lambda options: table(read_results(options.file)), KEPT)

if __name__ == "__main__":
    COMMAND.main()
