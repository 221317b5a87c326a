"""The tables and plots of docs/quality.md, from the JSON of the study."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality import adamw_tables, analysis, other_tables, plots, runs, selection, tables
from benchmarks.quality.analysis import Outcome
from benchmarks.report import IMAGES, read_results


def texts() -> dict[str, str]:
    """The generated parts of the page, by marker."""
    (found, adam), kept = _found(), selection.load()
    made = tables.blocks(found) | other_tables.blocks(found) | adamw_tables.blocks(found, adam)
    made |= {"vectors": other_tables.vectors(kept["vectors"]), "gradients": other_tables.gradients(kept["gradients"])}
    made |= {"made-by": made_by(found), "quality": tables.by_length(found)}
    made["adam-made-by"] = made_by(adam, runs.ADAM_KEPT) if adam else adamw_tables.NOTHING
    return made


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
