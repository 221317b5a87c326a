"""A GPT of 5.1 M parameters on two hosts behind a slow link with delay: AdamW, dense and with local steps.

What a run learns is the same behind any link: it is simulated, each run by a process. Its seconds are its steps times
the time of one by real ranks behind the link. That needs root. It takes some five hours a seed on 2 cores; what is
learnt is kept, so that a study that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, replace
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.netlab import lab
from benchmarks.quality.runs import pool
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import AVERAGED, LOCAL, LOCAL_DENSER, LOCAL_STEPS
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, environment, markdown, read_results, write_results

FILE, TIMEOUT_SECONDS = RESULTS / "internet.json.xz", 7200
HOSTS, POINTS = 2, 20  # points of a curve: when a loss is reached is read from it
TIMED_STEPS, DENSE_STEPS = 60, 12  # of each run behind the link: whole rounds; of dense, at 5 s each
NOTHING = "no exchange"
DENSE, PER_STEP = "AdamW, dense", "AdamW, dgc, 0.1% in 2 bits"  # which sends as much a step as local steps of 15
NAMES = (DENSE, PER_STEP, *AVERAGED, *LOCAL, *LOCAL_DENSER)
TRAINED = (DENSE, PER_STEP, *LOCAL_DENSER, *LOCAL, *AVERAGED)
TARGETS = (2.0, 1.8)  # nats a byte, beside what is so much worse than dense at its end
MARGINS = (0.2, 0.1)
LONG_ROUND = 15  # steps, of which nearly all exchange nothing
Results = dict[str, dict[str, Any]]  # by name of the variant
Points = Sequence[tuple[float, float]]  # (seconds, loss)


def measure(options: argparse.Namespace) -> None:
    """Each seed: what is not learnt yet, then the first steps behind the link."""
    kept = read_results(options.file)
    for seed in options.seeds:
        key = f"{options.task}, {options.rate}, {options.delay}, {options.loss}, seed {seed}"
        began = {"environment": environment(), "steps": options.steps}
        if any(kept.get(key, {}).get(name) != value for name, value in began.items()):
            kept[key] = {**began, "learnt": {}}
        _learn(options, seed, kept, key)
        kept[key]["link"], kept[key]["timed"] = _timed(options, seed)
        write_results(options.file, dict(sorted(kept.items())))


def _learn(options: argparse.Namespace, seed: int, kept: Results, key: str) -> None:
    """Train what a study of a seed has not kept yet."""
    from tqdm import tqdm

    learnt = kept[key]["learnt"]
    left = [Run(options.task, name, HOSTS, seed) for name in TRAINED if name not in learnt]
    with tqdm(total=len(left), unit="run", ncols=100) as bar, pool(os.cpu_count() or 1) as processes:
        futures = {processes.submit(train, run, steps=options.steps, points=POINTS): run for run in left}
        for future in as_completed(futures):
            learnt[futures[future].variant] = future.result()
            write_results(options.file, dict(sorted(kept.items())))
            bar.update()


def _timed(options: argparse.Namespace, seed: int) -> tuple[float, Results]:
    """Throughput of the link, and the first steps of the runs of a seed behind it, by name."""

    def order(name: str, most: int, exchanges: bool = True) -> dict[str, Any]:
        run = Run(options.task, name, HOSTS, seed)
        steps = min(options.steps or run.steps, most)
        return {"run": asdict(replace(run, real=True)), "steps": steps, "exchanges": exchanges}

    orders = [order(DENSE, TIMED_STEPS, False)]
    orders += [order(name, DENSE_STEPS if name == DENSE else TIMED_STEPS) for name in NAMES]
    with lab(HOSTS, options.rate, 1, options.delay, options.loss) as hosts:
        link = round(hosts.one_way(), 1)
        found = launch("benchmarks.quality.worker:timed_rank", orders, HOSTS, hosts, TIMEOUT_SECONDS)[0]
    return link, dict(zip([NOTHING, *NAMES], found, strict=True))


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
    """A table for each link and seed: bytes, time of a step, minutes to several losses beside dense."""
    return "\n\n".join(
        f"{key}; {found['link']:.0f} Mbit/s one way\n\n{_table(found['learnt'], found['timed'])}"
        for key, found in kept.items()
        if "link" in found  # not broken off
    )


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


COMMAND = Benchmark(
    "internet", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE,
    (
        argument("--rate", default="50mbit", metavar="R", help="of each link"),
        argument("--delay", default="40ms", metavar="D", help="from host to host"),
        argument("--loss", default="0%", metavar="L", help="of packets"),
        argument("--task", default="gpt", metavar="T", help="of benchmarks.quality"),
        argument("--seeds", type=int, nargs="+", default=[0], metavar="S", help="of the runs"),
        argument("--steps", type=int, metavar="S", help="of each run; None: whole runs"),
    )
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
