"""A GPT of 5.1 M parameters on two hosts behind a slow link with delay: AdamW, dense and with local steps.

What a run learns is the same behind any link: it is simulated, each run by a process. Its seconds are its steps times
the time of one by real ranks behind the link. That needs root. It takes some five hours on 2 cores; what is
learnt is kept, so that a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.command import Benchmark
from benchmarks.netlab import lab
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import AVERAGED, LOCAL, LOCAL_DENSER, LOCAL_STEPS
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, complete, markdown, read_results

FILE, TIMEOUT_SECONDS = RESULTS / "internet.json.xz", 7200
TASK, RATE, DELAY = "gpt", "50mbit", "40ms"
PLACE = f"{TASK}, {RATE}, {DELAY}, 0%, seed 0"  # of which nothing is lost
HOSTS, POINTS = 2, 20  # points of a curve: when a loss is reached is read from it
TIMED_STEPS, DENSE_STEPS = 60, 12  # of each run behind the link: whole rounds; of dense, at 5 s each
NOTHING = "no exchange"
DENSE = "AdamW, dense"
NAMES = (DENSE, *AVERAGED, *LOCAL, *LOCAL_DENSER)
TARGETS = (2.0, 1.8)  # nats a byte, beside what is so much worse than dense at its end
MARGINS = (0.2, 0.1)
LONG_ROUND = 15  # steps, of which nearly all exchange nothing
Results = dict[str, dict[str, Any]]  # by name of the variant
Points = Sequence[tuple[float, float]]  # (seconds, loss)


def measure(options: argparse.Namespace) -> None:
    """What each run learns, then the first steps of all of them behind the link."""
    learnt = {f"{PLACE}, {name}": partial(train, Run(TASK, name, HOSTS), points=POINTS) for name in NAMES}
    complete(options.file, learnt, processes=os.cpu_count() or 1)
    complete(options.file, {PLACE: timed})


def timed() -> dict[str, Any]:
    """Throughput of the link, and the first steps of the runs behind it, by name."""

    def order(name: str, steps: int, exchanges: bool = True) -> dict[str, Any]:
        return {"run": asdict(Run(TASK, name, HOSTS, real=True)), "steps": steps, "exchanges": exchanges}

    orders = [order(DENSE, TIMED_STEPS, False)]
    orders += [order(name, DENSE_STEPS if name == DENSE else TIMED_STEPS) for name in NAMES]
    with lab(HOSTS, RATE, 1, DELAY) as hosts:
        link = round(hosts.one_way(), 1)
        found = launch("benchmarks.quality.worker:timed_rank", orders, HOSTS, hosts, TIMEOUT_SECONDS)[0]
    return {"link": link, "timed": dict(zip([NOTHING, *NAMES], found, strict=True))}


def step_ms(run: Mapping[str, Any]) -> float:
    """Mean time of a step, exchanges included, without the first of all."""
    return statistics.mean(run["milliseconds"][1:])


def seconds_to(points: Points, target: float) -> float | None:
    """When a run is first as good as `target`, between evaluations by a straight line; None: it never is."""
    for (t0, l0), (t1, l1) in itertools.pairwise([points[0], *points]):
        if l1 <= target:
            return t1 if l0 == l1 else t0 + (t1 - t0) * (l0 - target) / (l0 - l1)
    return None


def table(kept: Mapping[str, Any]) -> str:
    """Bytes, time of a step, minutes to several losses beside dense."""
    if PLACE not in kept:
        return "The steps behind the link are not timed yet."
    found, learnt = kept[PLACE], {name: kept[f"{PLACE}, {name}"] for name in NAMES if f"{PLACE}, {name}" in kept}
    return f"{PLACE}; {found['link']:.0f} Mbit/s one way\n\n{_table(learnt, found['timed'])}"


def _table(learnt: Results, timed: Results) -> str:
    ms = {name: step_ms(run) for name, run in timed.items()}
    sent = {name: run["sent"] for name, run in timed.items()}
    curves = {
        name: [(ms[name] * step / 1e3, loss) for step, loss, _ in run["curve"]]
        for name, run in learnt.items()
        if name in timed
    }

    def to(name: str, target: float) -> str:
        mine, theirs = seconds_to(curves[name], target), seconds_to(curves[DENSE], target)
        if mine is None:
            return "never"
        return f"{mine / 60:.1f}" + (f" ({theirs / mine:.1f}×)" if theirs is not None and name != DENSE else "")

    targets = sorted([*TARGETS, *(learnt[DENSE]["loss"] + margin for margin in MARGINS)], reverse=True)
    lines = [[NOTHING, "", "", f"{ms[NOTHING]:.0f}", f"{ms[DENSE] / ms[NOTHING]:.1f}×", "", *("" for _ in targets)]]
    for name in (name for name in NAMES if name in timed):
        less = f"{sent[DENSE] / sent[name]:,.0f}×" if sent[name] else ""  # a run shorter than H sends nothing
        quality = [""] * (1 + len(targets))
        if name in learnt:
            quality = [f"{learnt[name]['loss']:.3f}", *(to(name, target) for target in targets)]
        times = f"{ms[name]:,.0f}", f"{ms[DENSE] / ms[name]:.1f}×"
        lines.append([name, f"{sent[name] / 1e3:,.1f}", less, *times, *quality])
    head = ["", "kB sent a step", "dense / these bytes", "ms a step", "speed-up of a step", "final loss, nats"]
    text = markdown([*head, *(f"min to {target:.2f} nats" for target in targets)], lines)
    return f"{text}\n\n{_between(timed)}"


def _between(timed: Results) -> str:
    """Time of the steps within long rounds, which exchange nothing, in words."""
    found = []
    for names in (AVERAGED, LOCAL, LOCAL_DENSER):
        for name, steps in zip(names, LOCAL_STEPS, strict=True):
            own = [ms for step, ms in enumerate(timed[name]["milliseconds"], start=1) if step % steps and step > 1]
            found += [statistics.median(own)] if own and steps >= LONG_ROUND else []
    if not found:
        return ""
    times = [step_ms(timed[DENSE]) / ms for ms in (max(found), min(found))]
    return (
        f"In rounds of {LONG_ROUND} and more, steps that exchange nothing take {min(found):.0f} to {max(found):.0f} ms "
        f"in the median: {times[0]:.1f} to {times[1]:.1f} times as fast as dense."
    )


COMMAND = Benchmark("internet", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE)

if __name__ == "__main__":
    COMMAND.main()
