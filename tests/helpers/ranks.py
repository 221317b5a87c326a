"""Run cases on real Horovod ranks: one ``horovodrun``, one JSON file per rank, the caller asserts.

A case is a function in ``tests/parallel/cases``, called on every rank; what it returns is written as JSON.
A launch that outlives its timeout, or loses a rank, is killed with all its children and fails.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.jobs import ROOT, run

Results = list[dict[str, Any]]  # one entry per rank: case name -> what it returned


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
    environment: dict[str, str] | None = None,
) -> Results:
    """Run `cases` one after another on `workers` ranks.

    Args:
        workers: number of ranks, all on this machine.
        cases: names as "module.function" below tests/parallel/cases.
        controller: "gloo" or "mpi"; skips, with the reason, if Horovod was built without it.
        timeout: seconds for the whole launch.
        launcher_flags: more flags for horovodrun.
        environment: more environment variables.
    """
    if controller not in built_controllers():
        pytest.skip(
            f"this Horovod was built without {controller}; install a system MPI and run scripts/build_horovod --force"
        )
    with tempfile.TemporaryDirectory(prefix="dgc-ranks-") as folder:
        command = ["horovodrun", f"--{controller}", "-np", str(workers), *launcher_flags]
        if controller == "mpi":
            command += ["--mpi-args=--oversubscribe --allow-run-as-root"]
        command += [sys.executable, "-m", "tests.helpers.rank_main", folder, *cases]
        log = run(command, timeout, {**(environment or {})}).output
        files = [Path(folder) / f"{rank}.json" for rank in range(workers)]
        if not all(file.exists() for file in files):
            missing = [rank for rank, file in enumerate(files) if not file.exists()]
            pytest.fail(f"ranks {missing} of {workers} left no result for {cases}; their output:\n{_of_ranks(log)}")
        return [json.loads(file.read_text()) for file in files]


def check_metrics_file(path: Path, method: str) -> None:
    """What ``DGC_METRICS_FILE`` has made of a run whose cases compress without `dgcrun`: rank 0's records alone."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["final"] for record in records] == [False] * (len(records) - 1) + [True]
    last = records[-1]
    assert last["method"] == method and last["steps"] > 0 and 0 < last["selected"] <= last["elements"]


def _of_ranks(log: str) -> str:
    """What the ranks themselves printed, without the launcher's own noise."""
    return "\n".join(line for line in log.splitlines() if line.startswith("["))[-6000:]
