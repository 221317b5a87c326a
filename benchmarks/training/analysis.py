"""Results of the runs: steps and seconds to the target quality, gain over dense, its limit, and checks.

The target of a seed is the quality that its own dense run ends with, less the task's margin; it is reached at the
first evaluation that is as good. Evaluations take no time here.

The rate of a link changes nothing in what is computed. So dense and fp16 on the slow link are not run to their end
there: their seconds are the steps that the fast link's run needed, times the slow link's median time per step. Both
are checked (`checks`): the losses of the first steps, and the product against the clock of a whole dense run. With
more than two hosts the losses of stock Horovod differ in their last bits: what it fuses depends on the moment, and
with that the order of its sums.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.exchange.tables import NAMES, STYLES
from benchmarks.report import label, markdown, panels, save_figure, spread
from benchmarks.training.tasks import COMPRESSED, FAST, FIRST, NO_OP, SLOW, STOCK, STUDIED, TASKS

BARS = {FAST: 3.0, SLOW: 10.0}  # how many times sooner than dense a compressed run must reach the target
SHARE_OF_CAP = 0.8  # or so much of what no exchange at all would gain, where that is less
Runs = dict[str, dict[str, Any]]


class Row(NamedTuple):
    """One method at a place: dense's seconds to the target over its own, seed by seed, and the line of the table."""

    method: str
    gain: tuple[float, ...]
    cells: list[str]


class Curve(NamedTuple):
    """Quality over time of one run: steps, seconds and quality go together; `computed`: seconds are not the clock's."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    quality: tuple[float, ...]
    target: float
    computed: bool


def _whole_rate(rate: str, method: str) -> str:
    """The link on which the whole run was made that stands for one at `rate`."""
    return FAST if rate == SLOW and method in (*STOCK, NO_OP) else rate


@dataclass(frozen=True)
class Place:
    """The launches of a task on so many hosts at a rate, of the seeds with a whole dense run."""

    kept: Mapping[str, Any]
    task: str
    hosts: int
    rate: str
    seeds: Sequence[int]

    def _whole(self, method: str, seed: int) -> Any:
        """The whole run, if there is one."""
        return runs_of(self.kept, self.task, self.hosts, _whole_rate(self.rate, method), seed).get(method)

    def _timed(self, method: str, seed: int) -> Any:
        """The run in which steps were timed, if there is one: that of the first steps before the whole one."""
        runs = runs_of(self.kept, self.task, self.hosts, self.rate, seed)
        return runs.get(f"{method}{FIRST}", runs.get(method))

    def methods(self) -> list[str]:
        """Those that all seeds have been run for."""
        return [
            method
            for method in (*STOCK, *COMPRESSED)
            if all(self._whole(method, seed) for seed in self.seeds) and self._timed(method, self.seeds[0])
        ]

    def step_ms(self, method: str, seeds: Sequence[int]) -> float:
        """Median time of a step over the seeds, in milliseconds, from the runs of the first steps where there are."""
        runs = [(self._whole if method == NO_OP else self._timed)(method, seed) for seed in seeds]
        return statistics.median(time for run in runs if run for time in run["milliseconds"])

    def curve(self, method: str, seed: int) -> Curve:
        """Quality over time of one run; where it is of another link with the computed time, see the module."""
        steps, clock, quality, _ = zip(*self._whole(method, seed)["curve"], strict=True)
        computed = _whole_rate(self.rate, method) != self.rate
        if computed:
            pace = self.step_ms(method, self.seeds[:1]) / 1e3
            clock = tuple(step * pace for step in steps)
        last, task = self._whole("dense", seed)["curve"][-1][2], TASKS[self.task]
        target = last - task.settings.margin * (1 if task.higher_is_better else -1)
        return Curve(steps, clock, quality, target, computed)

    def reached(self, method: str, seed: int) -> tuple[float, float]:
        """Steps and seconds at the first evaluation that is as good as the target; infinite if none is."""
        found, sign = self.curve(method, seed), 1 if TASKS[self.task].higher_is_better else -1
        for step, second, quality in zip(found.steps, found.seconds, found.quality, strict=True):
            if sign * quality >= sign * found.target:
                return step, second
        return math.inf, math.inf

    def rows(self) -> Iterator[Row]:
        """A row for every method, and what no exchange at all would gain."""
        methods, free_ms = self.methods(), self.step_ms(NO_OP, self.seeds)
        found = {method: [self.reached(method, seed) for seed in self.seeds] for method in methods}
        dense = found["dense"]
        found[NO_OP] = [(steps, steps * free_ms / 1e3) for steps, _ in dense]
        gains = {m: tuple(d / s for (_, d), (_, s) in zip(dense, own, strict=True)) for m, own in found.items()}
        cap = statistics.median(gains[NO_OP])
        for method, reached in found.items():
            made = [self._whole(method, seed) for seed in self.seeds]
            ms = self.step_ms(method, self.seeds)
            received, fp32 = (sum(run[name] for run in made) for name in ("received", "received_fp32"))
            computed = method == NO_OP or _whole_rate(self.rate, method) != self.rate
            steps, seconds = zip(*reached, strict=True)
            cells = [
                spread([run["curve"][-1][2] for run in made if run["curve"]], ".2f"),
                _median(steps, ".0f"),
                f"{_median(seconds, '.1f')}{'*' if computed else ''}",
                _median(gains[method], ".2f", "×"),
                self._bar(gains[method], cap) if method in COMPRESSED else "",
                f"{ms:.1f}",
                f"{1e3 * self.hosts * made[0]['batch'] / ms:.0f}",
                f"{free_ms / ms:.0%}",
                f"{received / sum(len(run['milliseconds']) for run in made) / 1e6:.3g}",
                f"{fp32 / received:.0f}×" if received else "",
            ]
            yield Row(method, gains[method], cells)

    def _bar(self, gain: Sequence[float], cap: float) -> str:
        """What the median gain has to be, and whether it is; nothing where nothing was promised."""
        if self.rate not in BARS:
            return ""
        bar = min(BARS[self.rate], SHARE_OF_CAP * cap)
        capped = " (0.8 of the cap)" if bar < BARS[self.rate] else ""
        return f"{bar:.1f}×{capped} {'met' if statistics.median(gain) >= bar else 'MISSED'}"


def places(kept: Mapping[str, Any]) -> Iterator[Place]:
    """Every place with a whole dense run, in the order of the tables."""
    split = [name.split(", ") for name in kept]
    tasks, hosts, rates, numbers = (sorted({parts[column] for parts in split}) for column in range(4))
    for task, count, rate in itertools.product(tasks, hosts, sorted(rates, key=lambda rate: rate != FAST)):
        where = task, int(count), _whole_rate(rate, "dense")
        seeds = [seed for seed in map(int, numbers) if "dense" in runs_of(kept, *where, seed)]
        found = Place(kept, task, int(count), rate, seeds)
        if seeds and found.methods():
            yield found


def runs_of(kept: Mapping[str, Any], *where: object) -> Runs:
    """The runs of a launch, by method, and ``FIRST`` where it is of the first steps alone."""
    return kept.get(", ".join(map(str, where)), {"runs": {}})["runs"]  # type: ignore[no-any-return]


def checks(kept: Mapping[str, Any]) -> list[str]:
    """Checks of the figures, in words: of the replicas, of the two links, and of steps times their time.

    On the slow link the first losses of a run, and the last weights of a whole one, are those on the fast one.
    """
    exchanged = [run["replicas"] for each in kept.values() for name, run in each["runs"].items() if name != NO_OP]
    slow = {name: each["runs"] for name, each in kept.items() if f", {SLOW}, " in name}
    fast = {name: kept[other]["runs"] for name in slow if (other := name.replace(SLOW, FAST)) in kept}
    both = [(run, fast[name][m.removesuffix(FIRST)]) for name in fast for m, run in slow[name].items()]
    different = [pair for pair in both if not _same(*pair)]
    largest = max((abs(a - b) / abs(b) for pair in different for a, b in _losses(*pair)), default=0.0)
    said = [
        f"Replicas with the same weights: {sum(exchanged)} of {len(exchanged)} runs. "
        f"Same losses on both links, bit for bit: {len(both) - len(different)} of {len(both)} runs; "
        f"of the others the largest difference is {largest:.1%}."
    ]
    for name, runs in slow.items():
        if {"dense", f"dense{FIRST}"} <= runs.keys():
            whole, (task, hosts, rate, seed) = runs["dense"]["milliseconds"], name.split(", ")
            ratio = statistics.median(runs[f"dense{FIRST}"]["milliseconds"]) * len(whole) / sum(whole)
            where = f"{task}, {hosts} hosts, {rate}, dense, seed {seed}"
            said.append(f"{where}: steps × time of a step is {ratio:.3f} of the clock's")
    return said


def _losses(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[float, float]]:
    return zip(first["losses"], second["losses"], strict=False)


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    whole = len(first["milliseconds"]) == len(second["milliseconds"])
    return all(a == b for a, b in _losses(first, second)) and (not whole or first["digest"] == second["digest"])


def study(kept: Mapping[str, Any]) -> str:
    """All figures as Markdown, one table a task, number of hosts and rate, and what they rest on."""
    text = []
    for place in places(kept):
        head = ["", TASKS[place.task].unit, "steps to target", "seconds to target", "gain", "bar", "ms a step"]
        head += ["samples/s", "efficiency", "MB received a step", "less"]
        table = markdown(head, [[row.method, *row.cells] for row in place.rows()])
        text.append(f"### {place.task}, {place.hosts} hosts, {place.rate}\n\n{table}")
    return "\n\n".join([*text, _footnotes(kept)])


def _median(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median and, for several seeds, the range."""

    def shown(value: float) -> str:
        return format(value, form) if math.isfinite(value) else "never"

    middle = statistics.median(values)
    ends = f" ({shown(min(values))}–{shown(max(values))})" if len(values) > 1 else ""
    return f"{shown(middle)}{unit if math.isfinite(middle) else ''}{ends}"


def _footnotes(kept: Mapping[str, Any]) -> str:
    longer = " or ".join(f"{TASKS[name].settings.stretch:g} times as long ({name})" for name in STUDIED)
    rates = {" hosts, ".join(name.split(", ")[1:3]): each["link_mbit"] for name, each in kept.items()}
    order = sorted(rates, key=lambda place: place.replace(SLOW, "slow"))
    links = "; ".join(f"{place}: {rates[place]} Mbit/s" for place in order if rates[place])
    lines = [
        "\\* steps × median time of a step, not the clock's. "
        "No-op: dense's steps without any exchange; its gain is the cap. "
        "Bytes of dense and fp16 are those of a ring, not counted.",
        "The target is the last quality of that seed's dense run, less the margin; every method reaches it at its "
        f"first evaluation that is as good. A compressed run's learning-rate schedule is {longer} as the others'.",
        f"Median over seeds and range. Links as measured: {links or 'none, ranks on this machine'}.",
        *checks(kept),
    ]
    return "\n\n".join(lines)


def draw(kept: Mapping[str, Any], hosts: int, file: Path) -> None:
    """Quality over training time, a row a task and a column a rate; a line a seed, dotted the target of the first.

    Dashed lines are runs whose seconds are steps times the time of a step, not the clock's.
    """
    mine = {(place.task, place.rate): place for place in places(kept) if place.hosts == hosts}
    tasks, rates = (list(dict.fromkeys(column)) for column in zip(*mine, strict=True))
    figure, grid = panels(len(rates), len(tasks), 5.2, 3.2)
    for (task, rate), place in mine.items():
        axes = grid[tasks.index(task)][rates.index(rate)]
        for method, (i, seed) in itertools.product(place.methods(), enumerate(place.seeds)):
            found, style = place.curve(method, seed), {"color": STYLES[method]["color"], "linewidth": 1.2}
            line_style = "--" if found.computed else "-"
            axes.semilogx(found.seconds, found.quality, linestyle=line_style, label=None if i else method, **style)
            if i == 0 and method == "dense":
                axes.axhline(found.target, color="0.6", linestyle=":", linewidth=1)
        label(axes, f"{task}, {hosts} hosts, {NAMES[rate]}", x="seconds of training")
    for task, line in zip(tasks, grid, strict=True):
        line[0].set_ylabel(TASKS[task].unit)
    grid[0][0].legend(frameon=False, fontsize=8)
    save_figure(figure, file)
