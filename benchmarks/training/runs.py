"""Which runs there are, how they are launched on a lab, and the file that keeps what they found.

A launch is one horovodrun: it trains one task from one seed with several methods, one after the other, so that all
of them meet the machine in the same state and its start is paid for once.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.netlab import Lab
from benchmarks.report import RESULTS, environment, read_results, write_results
from benchmarks.training.tasks import STUDIED, TASKS
from benchmarks.training.worker import COMPRESSED, NO_OP, STOCK, whole_steps

KEPT = RESULTS / "training.json.xz"
HOSTS = (2, 4)
FAST, SLOW = "1gbit", "100mbit"
UNSHAPED = "none"
FIRST_STEPS = 20  # of the stock methods on the slow link, where the whole run would take minutes
LAUNCH_SECONDS, STEP_SECONDS = 90, 4  # far more than any takes; then it is killed
Study = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One horovodrun: `methods` with their numbers of steps, for a task, a seed, so many hosts and a rate."""

    task: str
    hosts: int
    rate: str
    seed: int
    methods: tuple[tuple[str, int], ...]

    def key(self, method: str, steps: int) -> str:
        """Name of one of its runs in the file of results."""
        return key(self.task, self.hosts, self.rate, method, self.seed, steps)


def key(task: str, hosts: int, rate: str, method: str, seed: int, steps: int | None = None) -> str:
    """Name of a run in the file of results; `steps` None is a whole run."""
    first = "" if steps in (None, whole_steps(TASKS[task], method)) else f", first {steps} steps"
    return f"{task}, {hosts} hosts, {rate}, {method}, seed {seed}{first}"


def plan(seeds: Sequence[int]) -> Iterator[Launch]:
    """Every launch of the study, those of one lab one behind the other."""
    for hosts in HOSTS:
        for rate in (FAST, SLOW):
            for task in STUDIED:
                for seed in seeds:
                    first = seed == min(seeds)
                    yield Launch(task, hosts, rate, seed, tuple(_methods(task, hosts, rate, first)))


def _methods(task: str, hosts: int, rate: str, first_seed: bool) -> Iterator[tuple[str, int]]:
    whole = [(method, whole_steps(TASKS[task], method)) for method in (NO_OP, *STOCK, *COMPRESSED)]
    if rate == FAST:
        yield from whole
        return
    yield from whole[-len(COMPRESSED) :]
    if first_seed:  # a step takes as long whatever the seed
        yield from ((method, FIRST_STEPS) for method in STOCK)
        if (task, hosts) == ("lstm", 2):  # the one whole run that shows that steps x time per step is the clock's time
            yield whole[1]


def quick(rate: str) -> Launch:
    """A launch of seconds."""
    methods = (NO_OP, "dense", "dgc")
    return Launch("smoke", 2, rate, 0, tuple((method, whole_steps(TASKS["smoke"], method)) for method in methods))


def load(file: Path = KEPT) -> Study:
    """What is kept: ``runs`` by key, ``links`` in Mbit/s as measured by "hosts, rate"."""
    return {"links": {}, "runs": {}, **(read_results(file) if file.exists() else {})}


def missing(launch: Launch, study: Study) -> Launch | None:
    """What of a launch is not kept yet; None if nothing."""
    left = tuple(run for run in launch.methods if launch.key(*run) not in study["runs"])
    return dataclasses.replace(launch, methods=left) if left else None


def keep(launch: Launch, hosts: Lab | None, file: Path = KEPT) -> Study:
    """Run a launch and put what it found into the file.

    Args:
        launch: what to run.
        hosts: the lab that is up, or None for ranks on this machine.
        file: of results.

    Returns:
        All that is kept now.

    Raises:
        LaunchError: it failed or took too long; nothing of it is left running.
    """
    study, lab = load(file), f"{launch.hosts} hosts, {launch.rate}"
    if hosts and lab not in study["links"]:
        study["links"][lab] = round(hosts.one_way())
    found = execute(launch, hosts)
    study["runs"].update({launch.key(*run): found[run] for run in launch.methods})
    runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(study["runs"].items()))
    head = f' "environment": {json.dumps(environment())},\n "links": {json.dumps(study["links"])}'
    write_results(file, f'{{\n{head},\n "runs": {{\n{runs}\n }}\n}}\n')  # a line a run
    return study


def execute(launch: Launch, hosts: Lab | None) -> dict[tuple[str, int], dict[str, Any]]:
    """Run a launch; what `worker.train` gives, by method and steps.

    Raises:
        LaunchError: it failed or took too long; nothing of it is left running.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        runs = [f"{method}={steps}" for method, steps in launch.methods]
        seconds = LAUNCH_SECONDS + STEP_SECONDS * sum(steps for _, steps in launch.methods)
        words = [launch.task, str(launch.seed), str(file), *runs]
        ranks.launch("benchmarks.training.worker", words, launch.hosts, hosts, seconds)
        found = json.loads(file.read_text())
    return dict(zip(launch.methods, found, strict=True))
