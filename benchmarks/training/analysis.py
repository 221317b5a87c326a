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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import markdown, spread
from benchmarks.training.runs import FAST, FIRST_STEPS, SLOW, Study, key
from benchmarks.training.tasks import COMPRESSED, NO_OP, STOCK, STUDIED, TASKS

BARS = {FAST: 3.0, SLOW: 10.0}  # how many times sooner than dense a compressed run must reach the target
SHARE_OF_CAP = 0.8  # or so much of what no exchange at all would gain, where that is less
Runs = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One method on one task, number of hosts and rate; per-seed values in the order of the seeds.

    Args:
        task, hosts, rate, method: what was run.
        quality: at the end of each seed's run; empty for no-op.
        steps: to the target; infinite where it was not reached.
        seconds: to the target, infinite likewise. For no-op: those of dense's steps without exchange.
        gain: dense's seconds to the target over these, seed by seed; for no-op that is the cap.
        step_ms: median time of a step.
        samples_per_s: of all ranks together, at that time.
        efficiency: that over the no-op row's.
        sent, received: MB per rank and step.
        less: how many times fewer bytes than with fp32 come in: a packet goes to every other rank.
        extrapolated: seconds are steps times time per step, not the clock's.
        bar: what the median gain has to be, or None where nothing was promised.
    """

    task: str
    hosts: int
    rate: str
    method: str
    quality: tuple[float, ...]
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    gain: tuple[float, ...]
    step_ms: float
    samples_per_s: float
    efficiency: float
    sent: float
    received: float
    less: float
    extrapolated: bool
    bar: float | None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        return None if self.bar is None else statistics.median(self.gain) >= self.bar


@dataclass(frozen=True)
class Curve:
    """Quality over time of one run: steps, seconds and quality go together; `computed`: seconds are not the clock's."""

    task: str
    hosts: int
    rate: str
    method: str
    seed: int
    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    quality: tuple[float, ...]
    target: float
    computed: bool


def target(runs: Runs, task: str, hosts: int, seed: int, rate: str = FAST) -> float:
    """Quality that every method has to reach: the dense run's own last one, less the margin."""
    last = runs[key(task, hosts, rate, "dense", seed)]["curve"][-1][2]
    margin = TASKS[task].settings.margin
    return last - margin if TASKS[task].higher_is_better else last + margin


def step_ms(runs: Runs, task: str, hosts: int, rate: str, method: str, seeds: Iterable[int]) -> float:
    """Median time of a step over all seeds, in milliseconds, from the runs of the first steps where there are."""
    names = [[key(task, hosts, rate, method, seed, steps) for steps in (FIRST_STEPS, None)] for seed in seeds]
    kept = [next(name for name in pair if name in runs) for pair in names if any(name in runs for name in pair)]
    return statistics.median(time for name in kept for time in runs[name]["milliseconds"])


def curve(runs: Runs, task: str, hosts: int, rate: str, method: str, seeds: Sequence[int], seed: int) -> Curve:
    """Quality over time of one run; for dense and fp16 on the slow link with the computed time, see the module."""
    whole = _whole_rate(rate, method)
    points = runs[key(task, hosts, whole, method, seed)]["curve"]
    steps, clock, quality, _ = zip(*points, strict=True)
    if whole != rate:
        pace = step_ms(runs, task, hosts, rate, method, seeds[:1]) / 1e3
        clock = tuple(step * pace for step in steps)
    goal = target(runs, task, hosts, seed, _whole_rate(rate, "dense"))
    return Curve(task, hosts, rate, method, seed, steps, clock, quality, goal, computed=whole != rate)


def _whole_rate(rate: str, method: str) -> str:
    """The link on which the whole run was made that stands for one at `rate`."""
    return FAST if rate == SLOW and method in STOCK else rate


def reached(found: Curve) -> tuple[float, float]:
    """Steps and seconds at the first evaluation that is as good as the target; infinite if none is."""
    sign = 1 if TASKS[found.task].higher_is_better else -1
    for step, second, quality in zip(found.steps, found.seconds, found.quality, strict=True):
        if sign * quality >= sign * found.target:
            return step, second
    return math.inf, math.inf


def rows(runs: Runs) -> list[Row]:
    """A row for every task, number of hosts, rate and method that all seeds have been run for."""
    return [row for group in _groups(runs) for row in _rows_of(runs, *group)]


def curves(runs: Runs) -> list[Curve]:
    """Every run's quality over time: time in seconds at the rate that the curve names."""
    return [
        curve(runs, task, hosts, rate, method, seeds, seed)
        for task, hosts, rate, seeds in _groups(runs)
        for method in _methods(runs, task, hosts, rate, seeds)
        for seed in seeds
    ]


def _groups(runs: Runs) -> Iterator[tuple[str, int, str, list[int]]]:
    """Task, hosts, rate and the seeds with a whole dense run."""
    split = [name.split(", ") for name in runs]
    tasks, hosts, rates, seeds = (sorted({parts[column] for parts in split}) for column in (0, 1, 2, 4))
    for task in tasks:
        for count in (int(each.split()[0]) for each in hosts):
            for rate in sorted(rates, key=lambda rate: rate != FAST):
                numbers = sorted(int(each.removeprefix("seed ")) for each in seeds)
                done = [n for n in numbers if key(task, count, _whole_rate(rate, "dense"), "dense", n) in runs]
                if done and _methods(runs, task, count, rate, done):
                    yield task, count, rate, done


def _methods(runs: Runs, task: str, hosts: int, rate: str, seeds: list[int]) -> list[str]:
    def known(method: str) -> bool:
        whole = all(key(task, hosts, _whole_rate(rate, method), method, seed) in runs for seed in seeds)
        timed = _whole_rate(rate, method) == rate or key(task, hosts, rate, method, seeds[0], FIRST_STEPS) in runs
        return whole and timed

    return [method for method in (*STOCK, *COMPRESSED) if known(method)]


def _rows_of(runs: Runs, task: str, hosts: int, rate: str, seeds: list[int]) -> Iterator[Row]:
    methods = _methods(runs, task, hosts, rate, seeds)
    found = {m: [reached(curve(runs, task, hosts, rate, m, seeds, seed)) for seed in seeds] for m in methods}
    free_rate = FAST if rate == SLOW else rate
    free_ms = step_ms(runs, task, hosts, free_rate, NO_OP, seeds)
    dense = found["dense"]
    found[NO_OP] = [(steps, steps * free_ms / 1e3) for steps, _ in dense]
    cap = statistics.median(d / f for (_, d), (_, f) in zip(dense, found[NO_OP], strict=True))
    for method in (*methods, NO_OP):
        whole = FAST if method == NO_OP and rate == SLOW else _whole_rate(rate, method)
        made = [runs[key(task, hosts, whole, method, seed)] for seed in seeds]
        ms = free_ms if method == NO_OP else step_ms(runs, task, hosts, rate, method, seeds)
        count = sum(len(run["milliseconds"]) for run in made)
        sent, received, fp32 = (sum(run[name] for run in made) for name in ("sent", "received", "received_fp32"))
        yield Row(
            task, hosts, rate, method,
            quality=tuple(run["curve"][-1][2] for run in made if run["curve"]),
            steps=tuple(steps for steps, _ in found[method]),
            seconds=tuple(seconds for _, seconds in found[method]),
            gain=tuple(d / s for (_, d), (_, s) in zip(dense, found[method], strict=True)),
            step_ms=ms,
            samples_per_s=1e3 * hosts * made[0]["batch"] / ms,
            efficiency=free_ms / ms,
            sent=sent / count / 1e6,
            received=received / count / 1e6,
            less=fp32 / received if received else math.inf,
            extrapolated=method == NO_OP or whole != rate,
            bar=min(BARS[rate], SHARE_OF_CAP * cap) if method in COMPRESSED and rate in BARS else None,
        )  # fmt: skip


def checks(runs: Runs) -> dict[str, Any]:
    """Checks of the figures.

    Returns:
        ``replicas``: (runs whose ranks ended with the same weights, runs with an exchange); ``same_bits``: (runs on
        the slow link whose first losses, and for whole runs last weights, equal those on the fast one, all such
        runs); ``largest_difference`` of a first loss, relative, among those that do not; ``product_over_clock``: by
        key of a whole dense run on the slow link, its median time per step times its steps, over the seconds that
        it took.
    """
    exchanged = [run for name, run in runs.items() if f", {NO_OP}," not in name]
    pairs = [(name, name.split(", first")[0].replace(SLOW, FAST)) for name in runs if f", {SLOW}, " in name]
    pairs = [(slow, fast) for slow, fast in pairs if fast in runs]
    different = [(runs[slow], runs[fast]) for slow, fast in pairs if not _same(runs[slow], runs[fast])]
    product = {}
    for name, run in runs.items():
        if f", {SLOW}, dense," in name and f"{name}, first {FIRST_STEPS} steps" in runs:
            pace = statistics.median(runs[f"{name}, first {FIRST_STEPS} steps"]["milliseconds"])
            product[name] = pace * len(run["milliseconds"]) / sum(run["milliseconds"])
    return {
        "replicas": (sum(run["replicas"] for run in exchanged), len(exchanged)),
        "same_bits": (len(pairs) - len(different), len(pairs)),
        "largest_difference": max((_difference(*pair) for pair in different), default=0.0),
        "product_over_clock": product,
    }


def _same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    whole = len(first["milliseconds"]) == len(second["milliseconds"])
    losses = len(first["losses"])
    return first["losses"] == second["losses"][:losses] and (not whole or first["digest"] == second["digest"])


def _difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(first["losses"], second["losses"], strict=False))


def study(found: Study) -> str:
    """All figures as Markdown, one table a task, number of hosts and rate, and what they rest on."""
    text = []
    for (task, hosts, rate), group in itertools.groupby(
        rows(found["runs"]), lambda row: (row.task, row.hosts, row.rate)
    ):
        text.append(f"### {task}, {hosts} hosts, {rate}\n\n{_table(list(group))}")
    return "\n\n".join([*text, _footnotes(found)])


def _table(rows: Sequence[Row]) -> str:
    head = ["", TASKS[rows[0].task].unit, "steps to target", "seconds to target", "gain", "bar", "ms a step"]
    head += ["samples/s", "efficiency", "MB received a step", "less"]
    return markdown(head, [[row.method, *_cells(row)] for row in rows])


def _cells(row: Row) -> list[str]:
    quality = spread(row.quality, ".2f")
    capped = " (0.8 of the cap)" if row.bar is not None and row.bar < BARS[row.rate] else ""
    bar = "" if row.bar is None else f"{row.bar:.1f}×{capped} {'met' if row.met else 'MISSED'}"
    return [
        quality,
        _median(row.steps, ".0f"),
        f"{_median(row.seconds, '.1f')}{'*' if row.extrapolated else ''}",
        _median(row.gain, ".2f", "×"),
        bar,
        f"{row.step_ms:.1f}",
        f"{row.samples_per_s:.0f}",
        f"{row.efficiency:.0%}",
        f"{row.received:.3g}",
        f"{row.less:.0f}×" if row.received else "",
    ]


def _median(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median and, for several seeds, the range."""

    def shown(value: float) -> str:
        return format(value, form) if math.isfinite(value) else "never"

    middle = statistics.median(values)
    ends = f" ({shown(min(values))}–{shown(max(values))})" if len(values) > 1 else ""
    return f"{shown(middle)}{unit if math.isfinite(middle) else ''}{ends}"


def _footnotes(study: Study) -> str:
    found = checks(study["runs"])
    links = "; ".join(f"{name}: {rate} Mbit/s" for name, rate in study["links"].items())
    lines = [
        "\\* steps × median time of a step, not the clock's. "
        "No-op: dense's steps without any exchange; its gain is the cap. "
        "Bytes of dense and fp16 are those of a ring, not counted.",
        "The target is the last quality of that seed's dense run, less the margin; every method reaches it at its "
        f"first evaluation that is as good. {_schedules()}",
        f"Median over seeds and range. Links as measured: {links or 'none, ranks on this machine'}.",
        f"Replicas with the same weights: {found['replicas'][0]} of {found['replicas'][1]} runs. "
        f"Same losses on both links, bit for bit: {found['same_bits'][0]} of {found['same_bits'][1]} runs; "
        f"of the others the largest difference is {found['largest_difference']:.1%}.",
        *(
            f"{name}: steps × time of a step is {ratio:.3f} of the clock's"
            for name, ratio in found["product_over_clock"].items()
        ),
    ]
    return "\n\n".join(lines)


def _schedules() -> str:
    """How long the compressed runs' schedules are."""
    longer = [f"{TASKS[name].settings.stretch:g} times as long ({name})" for name in STUDIED]
    return f"A compressed run's learning-rate schedule is {' or '.join(longer)} as the others'."
