"""The tables and plots of docs/quality.md, from the JSON of the study."""

from __future__ import annotations

import functools
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.quality import adamw_tables, analysis, other_tables, plots, runs, selection, tables
from benchmarks.quality.analysis import Outcome
from benchmarks.quality.runs import LENGTHS
from benchmarks.quality.training import Run
from benchmarks.report import IMAGES, read_results


def texts() -> dict[str, str]:
    """The generated parts of the page, by marker."""
    (found, adam), kept = _found(), selection.load()
    made = tables.blocks(found) | other_tables.blocks(found) | adamw_tables.blocks(found, adam)
    made |= {"vectors": other_tables.vectors(kept["vectors"]), "gradients": other_tables.gradients(kept["gradients"])}
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
