"""Run cases on real Horovod ranks, started by ``horovodrun``: one JSON file per rank, the caller asserts.

A case is a function in ``tests/parallel/cases``, called on every rank; what it returns is written as JSON.
A launch that outlives its timeout, or loses a rank, is killed with all its children and fails.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, run
from tests.helpers.standing_ranks import Environment, Results, StandingRanks, result_file, results_of


@functools.cache
def built_controllers() -> set[str]:
    """Which of "gloo" and "mpi" this Horovod can launch with."""
    code = "import horovod.torch as h; print('gloo' * h.gloo_built(), 'mpi' * h.mpi_built())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    return set(out.stdout.split())


def run_ranks(
    workers: int,
    cases: list[str],
    controller: str = "gloo",
    timeout: float = 240,
    launcher_flags: tuple[str, ...] = (),
    environment: Environment | None = None,
    fresh: bool = False,
    folder: Path | None = None,
    last: bool = False,
) -> Results:
    """Run `cases` one after another on `workers` ranks.

    Over Gloo, with nothing asked of the launcher, ranks that are up already run them: to start ranks takes longer than
    most cases do. Where those fail, ranks of their own decide.

    Args:
        workers: number of ranks, all on this machine.
        cases: names as "module.function" below tests/parallel/cases.
        controller: "gloo" or "mpi"; skips, with the reason, if Horovod was built without it. "nodes": over Gloo, on two
            nodes, which are two names of this machine, with the process sets of nodes.
        timeout: seconds for the whole launch.
        launcher_flags: more flags for horovodrun.
        environment: more environment variables while the cases run.
        fresh: whether the cases need processes of their own: they look at memory, start Horovod with variables that
            it reads once, or what they have begun ends with the process.
        last: whether these ranks end then. Where a rank was waited for in vain, or more operations were made on one
            rank than on another, cases whose operations have no names cannot follow: Horovod numbers them. Mark such
            tests with ``ranks(..., last=1)``, or 2: they come after the others on the same ranks.
        folder: that the cases find in ``DGC_TEST_FOLDER``, to keep checkpoints in.
    """
    if controller == "gloo" and os.environ.get("DGC_TEST_ON_NODES"):  # by hand: the same promises with nodes of two
        controller, workers = "nodes", 2 * workers
    if controller == "nodes":
        hosts = f"localhost:{workers // 2},127.0.0.1:{workers // 2}"
        controller, launcher_flags = "gloo", (*launcher_flags, "-H", hosts)
        environment = {"DGC_TEST_NODES": "1", "DGC_NODE_SIZE": str(workers // 2), **(environment or {})}
    if controller not in built_controllers():
        pytest.skip(
            f"this Horovod was built without {controller}; install a system MPI and run scripts/build_horovod --force"
        )
    kind = _kind(cases)
    if controller == "gloo" and not (launcher_flags or fresh):
        standing = StandingRanks.of(workers, kind, lambda place: _command(place, workers))
        results = standing.run(cases, timeout, folder, environment)
        if last:
            standing.end()
        if results is not None:
            return results
    StandingRanks.started += workers
    with tempfile.TemporaryDirectory(prefix="dgc-ranks-") as place:
        command = _command(place, workers, controller, launcher_flags)
        variables = {"DGC_TEST_KIND": kind, "DGC_TEST_FOLDER": str(folder or ""), **(environment or {})}
        log = run([*command, *cases], timeout, variables).output
        results = results_of(Path(place), 0, workers)
        if results is None:
            missing = [rank for rank in range(workers) if not result_file(Path(place), 0, rank).exists()]
            pytest.fail(f"ranks {missing} of {workers} left no result for {cases}; their output:\n{_of_ranks(log)}")
        return results


def _kind(cases: list[str]) -> str:
    return "keras" if all(case.startswith("keras_") for case in cases) else "torch"


# The program horovodrun, but it asks torch and not TensorFlow, which loads for seconds, how Horovod was built.
_HOROVODRUN = (
    "from horovod.common.util import EXTENSIONS; EXTENSIONS.sort(reverse=True); "
    "from horovod.runner.launch import run_commandline; run_commandline()"
)


def _command(folder: str, workers: int, controller: str = "gloo", flags: tuple[str, ...] = ()) -> list[str]:
    command = [sys.executable, "-c", _HOROVODRUN, f"--{controller}", "-np", str(workers), *flags]
    if controller == "mpi":
        command += ["--mpi-args=--oversubscribe --allow-run-as-root"]
    return [*command, sys.executable, "-m", "tests.helpers.rank_main", folder]


def check_metrics_file(path: Path, method: str) -> None:
    """What ``DGC_METRICS_FILE`` has made of a run whose cases compress without `dgcrun`: rank 0's records alone."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["final"] for record in records] == [False] * (len(records) - 1) + [True]
    last = records[-1]
    assert last["method"] == method and last["steps"] > 0 and 0 < last["selected"] <= last["elements"]


def _of_ranks(log: str) -> str:
    """What the ranks themselves printed, without the launcher's own noise."""
    return "\n".join(line for line in log.splitlines() if line.startswith("["))[-6000:]
