"""What stands in docs/quality.md, from the JSON of the study."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality import (
    adam_tables,
    analysis,
    auto_tables,
    exchange_tables,
    local_tables,
    plots,
    runs,
    selection,
    selection_tables,
    tables,
)
from benchmarks.quality.analysis import Outcome
from benchmarks.report import ROOT, read_results

PAGE = ROOT / "docs" / "quality.md"


def texts() -> dict[tuple[Path, str], str]:
    """The generated parts of the page, by marker."""
    found, kept = analysis.outcomes(runs.load()), selection.load()
    made = {**tables.blocks(found), "vectors": selection_tables.vectors(kept["vectors"])}
    made |= {"gradients": selection_tables.gradients(kept["gradients"]), "made-by": made_by(found)}
    made["quality"] = tables.by_length(found)
    made |= {"local": local_tables.table(found), "outer": local_tables.outer(found)}
    made |= exchange_tables.blocks(found) | adam_tables.blocks(found) | auto_tables.blocks(found)
    return {(PAGE, marker): text for marker, text in made.items()}


def made_by(found: Sequence[Outcome]) -> str:
    """How many runs there are, and with what."""
    used = read_results(runs.KEPT)["environment"]  # of all of them, see `runs.complete`
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
    found = analysis.outcomes(runs.load())
    plots.draw(found, selection.load())
    adam_tables.draw(found, ROOT / "docs" / "images" / "quality_frozen_adam.svg")
