"""Short and long runs at the density that `auto` takes for them, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality.analysis import Outcome, rows
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.variants import AUTOMATIC, UNMASKED, VARIANTS
from benchmarks.report import markdown, spread

FIRST_SEED = 700  # of this study


def table(found: Sequence[Outcome]) -> str:
    """A line a task and length: density, loss and accuracy less those of dense training of the same seed."""
    names = ("dense", *AUTOMATIC, *UNMASKED)
    shown = rows(found, lambda run: run.seed >= FIRST_SEED and run.variant in names)
    lines = []
    for row in sorted(shown, key=lambda row: (row.run.task, row.run.steps, row.run.variant)):
        fields = VARIANTS[row.run.variant].fields
        if fields is not None:
            title = f"{TASKS[row.run.task].title}, {row.run.steps:,} steps"
            gaps = [spread(row.loss_gap, "+.3f"), spread(row.accuracy_gap, "+.2f")]
            masked = "yes" if fields["factor_masking"] else "no"
            lines.append([title, f"{fields['density']:.1%}", masked, *gaps, str(len(row.loss_gap))])
    head = ["N = 4, auto less dense", "density", "momentum masked", "loss, nats", "accuracy, points", "seeds"]
    return markdown(head, lines)


def blocks(found: Sequence[Outcome]) -> dict[str, str]:
    """The table of the page, by marker."""
    return {"auto": table(found)}
