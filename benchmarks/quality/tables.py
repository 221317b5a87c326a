"""Results of the runs, and as Markdown: variants beside dense runs of the same seed, differences beyond the noise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.runs import LENGTHS, LONGER, LONGEST, WORKERS, Results
from benchmarks.quality.tasks import ALL_TASKS, TASKS
from benchmarks.quality.training import Run
from benchmarks.quality.variants import ABLATION, CHOICES, LOWEST, OPTIMIZERS, VARIANTS, WITHOUT
from benchmarks.report import markdown, spread

# Two-sided 5% points of Student's t, by degrees of freedom
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}


@dataclass(frozen=True)
class Outcome:
    """One run: its last test loss in nats and accuracy in percent; infinite and not a number where it diverged."""

    run: Run
    loss: float
    accuracy: float
    traffic: float
    curve: list[list[float]]


@dataclass(frozen=True)
class Row:
    """One variant over its seeds, in the order of the seeds; gaps are to the dense run of the same seed.

    Args:
        run: of the first seed.
        loss, accuracy: of each seed.
        loss_gap, accuracy_gap: the variant's less that of dense; empty for lack of a dense run.
        traffic: bytes sent, in those of dense fp32, of the runs that ended; not a number where none did.
    """

    run: Run
    loss: list[float]
    accuracy: list[float]
    loss_gap: list[float]
    accuracy_gap: list[float]
    traffic: float

    @property
    def diverged(self) -> int:
        """How many of the runs."""
        return sum(math.isinf(loss) for loss in self.loss)


def outcomes(results: Results) -> list[Outcome]:
    """Every run that is kept, in the order of the variants."""
    found = []
    for kept in results.values():
        last = (math.inf, math.nan) if kept["diverged"] else (kept["loss"], 100 * kept["accuracy"])
        found.append(Outcome(Run(**kept["run"]), *last, kept.get("traffic", 1.0), kept["curve"]))
    place = {name: i for i, name in enumerate(VARIANTS)}
    return sorted(found, key=lambda each: (place.get(each.run.variant, len(place)), each.run.seed))


def baseline(variant: str) -> str:
    """The dense variant that a variant is compared with: the one of the same optimizer."""
    family = variant.split(",")[0]
    return f"{family}, dense" if f"{family}, dense" in VARIANTS else "dense"


def rows_of(found: Sequence[Outcome], keep: Callable[[Run], bool] = lambda run: True, **fields: Any) -> list[Row]:
    """A row a variant, number of ranks and length, of the runs that `keep` lets through and that have these fields."""
    by_run = {each.run: each for each in found}
    groups: dict[Run, list[Outcome]] = defaultdict(list)
    for each in found:
        if keep(each.run) and all(getattr(each.run, name) == value for name, value in fields.items()):
            groups[replace(each.run, seed=0)].append(each)
    made = []
    for group in groups.values():
        pairs = [(each, by_run.get(replace(each.run, variant=baseline(each.run.variant)))) for each in group]
        gaps = [(each.loss - dense.loss, each.accuracy - dense.accuracy) for each, dense in pairs if dense]
        columns = ([each.loss for each in group], [each.accuracy for each in group], *_columns(gaps, 2))
        ended = [each.traffic for each in group if math.isfinite(each.loss)]
        made.append(Row(group[0].run, *columns, statistics.mean(ended) if ended else math.nan))
    return made


def _columns(lines: Sequence[Sequence[float]], count: int) -> list[list[float]]:
    return [[line[i] for line in lines] for i in range(count)]


def paired(found: Iterable[Outcome], *runs: Run) -> list[list[Outcome]]:
    """The outcomes of all of `runs`, for every seed that each of them has."""
    by_run = {each.run: each for each in found}
    rows = ([by_run.get(replace(run, seed=seed)) for run in runs] for seed in sorted({run.seed for run in by_run}))
    return [[each for each in row if each is not None] for row in rows if None not in row]


def gaps(found: Iterable[Outcome], run: Run, *others: Run) -> list[float]:
    """Loss of `run` less the lowest of `others`, for every seed that all of them have."""
    return [mine.loss - min(each.loss for each in rest) for mine, *rest in paired(found, run, *others)]


def is_clear(values: Sequence[float]) -> bool:
    """Whether the mean of three or more finite values is further from 0 than chance puts it 19 times in 20."""
    if len(values) < 3 or not all(map(math.isfinite, values)):
        return False
    error = statistics.stdev(values) / math.sqrt(len(values))
    return abs(statistics.mean(values)) > _T[min(len(values) - 1, max(_T))] * error


@dataclass(frozen=True)
class Difference:
    """The change from `before` to `after`, paired by seed and N: loss and accuracy less its own, bytes in its own."""

    before: str
    after: str
    losses: list[float]
    accuracies: list[float]
    sent: list[float]

    @property
    def diverged(self) -> bool:
        """Whether a run of either did."""
        return not all(map(math.isfinite, self.losses))

    @property
    def clear(self) -> bool:
        """Whether it is beyond the noise; see `is_clear`."""
        return self.diverged or is_clear(self.losses)

    @property
    def verdict(self) -> str:
        """Whether the step goes the way of the published tables: down."""
        if self.diverged:
            cured = all(math.isfinite(loss) or loss == -math.inf for loss in self.losses)
            return "as published: does not diverge any more" if cured else "diverges"
        if not self.clear:
            return "within the noise"
        return "as published" if statistics.mean(self.losses) < 0 else "**the other way**"


def differences(found: Sequence[Outcome], task: str) -> list[Difference]:
    """Each step of the ablation on a task, over all seeds and numbers of ranks; and all from residual to masking."""
    names = [name for name in list(ABLATION)[1:] if any(each.run.variant == name for each in _short(found, task))]
    steps = [*itertools.pairwise(names), ("+ residual (TopK-SGD)", "+ factor masking")]
    made = [difference(found, task, before, after) for before, after in steps]
    return [step for step in made if step.losses]


def difference(found: Iterable[Outcome], task: str, before: str, after: str) -> Difference:
    """The change from `before` to `after` on a task."""
    mine = {each.run: each for each in _short(found, task)}
    pairs = [(mine.get(replace(run, variant=before)), each) for run, each in mine.items() if run.variant == after]
    changes = [(b.loss - a.loss, b.accuracy - a.accuracy, b.traffic / a.traffic) for a, b in pairs if a]
    return Difference(before, after, *_columns(changes, 3))


def _short(found: Iterable[Outcome], task: str) -> list[Outcome]:
    """The simulated runs of a task of its own length."""
    return [each for each in found if each.run.task == task and each.run.length == 1 and not each.run.real]


@dataclass(frozen=True)
class Goal:
    """The most that the longest runs of a task may lose to dense ones.

    Args:
        name: of the task and the figure.
        figure: "loss" or "accuracy".
        most: nats or points.
    """

    name: str
    figure: str
    most: float

    def gap(self, row: Row) -> list[float]:
        """The figure less dense's own, of each seed."""
        return row.accuracy_gap if self.figure == "accuracy" else row.loss_gap

    def shown(self, row: Row | None) -> str:
        """The gap; of dense training the figure itself."""
        form = ".2f" if self.figure == "accuracy" else ".3f"
        if row is None:
            return ""
        if row.run.variant == "dense":
            return spread(row.accuracy if self.figure == "accuracy" else row.loss, form)
        return spread(self.gap(row), f"+{form}")

    def verdict(self, row: Row) -> str:
        """Whether the full recipe, of which it is the goal, loses no more."""
        if not row.run.variant.startswith("dgc") or not self.gap(row):
            return ""
        lost = statistics.mean(self.gap(row)) * (-1 if self.figure == "accuracy" else 1)
        return f"{self.most:g}: {'met' if lost <= self.most else 'MISSED'}"


GOALS = {
    "images": Goal("images, accuracy in points", "accuracy", 0.3),
    "lstm": Goal("LSTM, loss in nats", "loss", 0.02),
}
_NO_GOAL = Goal("Transformer, loss in nats", "loss", math.inf)  # its runs have one length
_SUMMARY = (("images", "dgc"), ("lstm", "dgc"), ("lstm", "dgc, density 0.1%"), ("transformer", "dgc"))


def every_run(results: Results) -> str:
    """Every run that is kept, a table a task, number of ranks and length."""
    found = outcomes(results)
    text = []
    for place in sorted({(each.run.task, each.run.workers, each.run.length, each.run.real) for each in found}):
        (task, workers, length, real), by = place, ", Horovod's ranks" if place[3] else ""
        mine = rows_of(found, task=task, workers=workers, length=length, real=real)
        text.append(f"### {ALL_TASKS[task].title}, N = {workers}, length ×{length:g}{by}\n\n{_rows(mine)}")
    return "\n\n".join(text)


def blocks(found: Sequence[Outcome]) -> dict[str, str]:
    """The tables of the page that show runs, by marker."""
    return {
        "tasks": _tasks(),
        "ablation": "\n\n".join(_by_task(found, workers, (*ABLATION, *WITHOUT)) for workers in WORKERS),
        "order": _order(found),
        "longer": _longer(found),
        "lowest": _lowest(found),
        "choices": "\n\n".join(_by_task(found, workers, ("dense", *CHOICES)) for workers in WORKERS),
        "against-defaults": _against_defaults(found),
        "optimizers": _optimizers(found),
    }


def _rows(rows: Iterable[Row]) -> str:
    head = ["", "test loss", "accuracy, %", "loss minus dense", "accuracy minus dense", "bytes sent"]
    lines = []
    for row in rows:
        figures = (spread(row.loss, ".3f"), spread(row.accuracy, ".2f"))
        gaps = (spread(row.loss_gap, "+.3f"), spread(row.accuracy_gap, "+.2f"))
        lines.append([row.run.variant, *figures, *gaps, _share(row.traffic)])
    return markdown(head, lines)


def _share(traffic: float) -> str:
    if math.isnan(traffic):  # no run ended
        return ""
    return f"1/{1 / traffic:.0f}" if traffic < 1 else "all"


def _tasks() -> str:
    lines = []
    for task in TASKS.values():
        settings, parameters = task.settings, sum(p.numel() for p in task(0).model.parameters())
        warmup = VARIANTS["dgc"].config(settings).warmup
        clip = "" if settings.clip_norm is None else f"{settings.clip_norm:g}"
        lines.append(
            [task.title, f"{parameters:,}", f"{settings.density:.1%}", settings.steps, 4 * settings.batch]
            + [f"{settings.lr:g}", clip, f"{warmup.steps} ({warmup.steps / settings.steps:.0%})"]
        )
    head = ["", "parameters", "density", "steps", "global batch", "learning rate", "clip norm", "steps of warm-up"]
    return markdown(head, lines)


def _by_task(found: Sequence[Outcome], workers: int, variants: Sequence[str]) -> str:
    mine = rows_of(found, workers=workers, length=1.0, real=False)
    rows = {(row.run.task, row.run.variant): row for row in mine}

    def cells(row: Row | None) -> list[str]:
        if row is None:
            return ["", "", ""]
        return [spread(row.loss, ".3f"), "" if row.diverged else spread(row.accuracy, ".2f"), _share(row.traffic)]

    lines = [[name, *(cell for task in TASKS for cell in cells(rows.get((task, name))))] for name in variants]
    return markdown([f"N = {workers}", *_heads("{}: loss", "accuracy, %", "bytes sent")], lines)


def _heads(*columns: str) -> list[str]:
    """These columns for each task; {} stands for its title."""
    return [column.format(task.title) for task in TASKS.values() for column in columns]


def _order(found: Sequence[Outcome]) -> str:
    lines = []
    for task in TASKS:
        for step in differences(found, task):
            changes = ["", ""] if step.diverged else [spread(step.losses, "+.3f"), spread(step.accuracies, "+.2f")]
            name = f"{step.before} → {step.after}"
            lines.append([TASKS[task].title, name, *changes, len(step.losses), step.verdict])
    return markdown(["", "step", "loss changes by", "accuracy by", "pairs", "verdict"], lines)


def _longer(found: Sequence[Outcome]) -> str:
    lines = []
    for task, goal in GOALS.items():
        for workers in WORKERS:
            rows = rows_of(found, task=task, workers=workers, real=False)
            longest = {row.run.variant for row in rows if row.run.length == LENGTHS[-1]}
            for variant in (name for name in LONGER if name in longest):
                mine = {row.run.length: row for row in rows if row.run.variant == variant}
                shown, last = [goal.shown(mine.get(length)) for length in LENGTHS], mine[LENGTHS[-1]]
                lines.append([f"{goal.name}, N = {workers}", variant, *shown, goal.verdict(last), _share(last.traffic)])
    lengths = [f"×{length:g}" for length in LENGTHS]
    return markdown(["difference to dense", "", *lengths, "limit, longest", "bytes sent, longest"], lines)


def _lowest(found: Sequence[Outcome]) -> str:
    """Loss of the LSTM at the papers' density, each beside the dense run of its own learning rate."""
    shown = ("dense", "dgc", "dgc, density 0.1%", *LOWEST)
    lines = []
    for workers, length in ((min(WORKERS), LENGTHS[-1]), (min(WORKERS), LONGEST), (max(WORKERS), LENGTHS[-1])):
        for row in rows_of(found, task="lstm", workers=workers, length=length, real=False):
            if row.run.variant in shown:
                figures = spread(row.loss, ".3f"), spread(row.loss_gap, "+.3f"), len(row.loss), _share(row.traffic)
                lines.append([f"N = {workers}, ×{length:g}", row.run.variant, *figures])
    return markdown(["", "", "test loss", "minus dense at that rate", "seeds", "bytes sent"], lines)


def _against_defaults(found: Sequence[Outcome]) -> str:
    def cells(change: Difference) -> list[str]:
        if not change.losses or change.diverged:
            return ["diverges" if change.losses else "", ""]
        noise = "" if change.clear else " (noise)" if len(change.losses) > 2 else " (too few)"
        return [f"{spread(change.losses, '+.3f')}{noise}", f"{statistics.mean(change.sent):.2f}×"]

    lines = [
        [name, *(cell for task in TASKS for cell in cells(difference(found, task, "dgc", name)))]
        for name in CHOICES
        if name != "dgc"
    ]
    return markdown(["difference to `.dgc()`", *_heads("{}: loss", "bytes")], lines)


def _optimizers(found: Sequence[Outcome]) -> str:
    shown = (*OPTIMIZERS, "dense", "dgc", "topk (TopK-SGD)")
    first = [each for each in found if each.run.seed < 100]  # of this study; that of Adam has others
    mine = rows_of(first, task="transformer", workers=4, real=False)
    return _rows(row for row in mine if row.run.variant in shown)


def by_length(found: Sequence[Outcome]) -> str:
    """The main table: what a run of each length loses to dense training, and what the longest sends."""
    lines = []
    for task, variant in _SUMMARY:
        goal = GOALS.get(task, _NO_GOAL)
        for workers in WORKERS:
            mine = rows_of(found, task=task, workers=workers, real=False, variant=variant)
            rows = {row.run.length: row for row in mine if row.run.length in LENGTHS}
            density = VARIANTS[variant].config(TASKS[task].settings).density
            sent = _share(rows[max(rows)].traffic) if rows else ""
            shown = [goal.shown(rows.get(length)) for length in LENGTHS]
            lines.append([f"{goal.name}, density {density:.1%}, N = {workers}", *shown, sent])
    head = ["`.dgc()` minus dense", *(f"{length:g}× the steps" for length in LENGTHS), "bytes sent, longest"]
    return markdown(head, lines)
