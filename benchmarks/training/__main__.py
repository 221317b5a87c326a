"""Training on hosts behind slow links, dense and compressed: seconds per step and to a target quality.

It needs root for the hosts' links, and about an hour on 2 cores that do nothing else. What has been run is
kept, so that a study that was stopped goes on; to measure anew: --file.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmarks.command import Benchmark
from benchmarks.netlab import unavailable
from benchmarks.ranks import HERE, hosts_at, launch
from benchmarks.report import RESULTS, complete, read_results
from benchmarks.training import analysis, tasks
from benchmarks.training.tasks import COMPRESSED, FAST, NO_OP, SLOW, STOCK, TASKS, whole_steps

FILE, SEEDS = RESULTS / "training.json.xz", (0, 1, 2)
LAUNCH_SECONDS, STEP_SECONDS = 90, 4  # far more than any takes; then it is killed


class Launch(NamedTuple):
    """One horovodrun: runs by name, with their numbers of steps, for a task, so many hosts, a rate and a seed.

    One after the other, so that all of them meet the machine in the same state and its start is paid for once.
    """

    task: str
    hosts: int
    rate: str
    seed: int
    methods: dict[str, int]


def plan() -> Iterator[Launch]:
    """Every launch of the study."""
    for count, rate, task, seed in itertools.product(tasks.HOSTS, (FAST, SLOW), tasks.STUDIED, SEEDS):
        whole = {method: whole_steps(TASKS[task], method) for method in (NO_OP, *STOCK, *COMPRESSED)}
        methods = {name: whole[name] for name in (whole if rate == FAST else COMPRESSED)}
        if rate == SLOW and seed == min(SEEDS):  # a step takes as long whatever the seed
            methods.update((f"{method}{tasks.FIRST}", tasks.FIRST_STEPS) for method in STOCK)
            if (task, count) == ("lstm", 2):  # the one whole run that shows that steps x time per step is the clock's
                methods["dense"] = whole["dense"]
        yield Launch(task, count, rate, seed, methods)


def figures(which: Launch) -> dict[str, Any]:
    """The throughput of the link, and the runs of a launch by name."""
    with hosts_at(which.hosts, which.rate) as hosts:
        link = round(hosts.one_way()) if hosts else None
        seconds = LAUNCH_SECONDS + STEP_SECONDS * sum(which.methods.values())
        found = launch("benchmarks.training.tasks:rank", which._asdict(), which.hosts, hosts, seconds)[0]
    return {"link_mbit": link, "runs": found}


def measure(options: argparse.Namespace) -> None:
    """Every launch that is not kept yet; to be quick one of a narrow model, without a lab where none can be had."""
    launches = plan()
    if options.quick:
        methods = {name: whole_steps(TASKS["smoke"], name) for name in (NO_OP, "dense", "dgc")}
        launches = iter([Launch("smoke", 2, HERE if unavailable() else FAST, 0, methods)])
    complete(options.file, {", ".join(map(str, each[:4])): partial(figures, each) for each in launches})


COMMAND = Benchmark(
    "training", __doc__ or "", measure, lambda options: analysis.study(read_results(options.file)), FILE, quick=True
)

if __name__ == "__main__":
    COMMAND.main()
