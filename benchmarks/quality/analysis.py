"""Results of the runs: each variant beside the dense run of the same seed, and differences beyond the noise."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.quality.runs import Results
from benchmarks.quality.training import Run
from benchmarks.quality.variants import ABLATION, VARIANTS

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
    selected: list[list[float]]


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
        counts = kept.get("traffic", 1.0), kept["curve"], kept.get("selected", [])
        found.append(Outcome(Run(**kept["run"]), *last, *counts))
    place = {name: i for i, name in enumerate(VARIANTS)}
    return sorted(found, key=lambda each: (place.get(each.run.variant, len(place)), each.run.seed))


def baseline(variant: str) -> str:
    """The dense variant that a variant is compared with: the one of the same optimizer."""
    family = variant.split(",")[0]
    return f"{family}, dense" if f"{family}, dense" in VARIANTS else "dense"


def rows(found: Sequence[Outcome], keep: Callable[[Run], bool] = lambda run: True, **fields: Any) -> list[Row]:
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
