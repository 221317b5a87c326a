"""Run cases on real Horovod ranks: one ``horovodrun``, one JSON file per rank, the caller asserts.

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
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
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
        log = _run(command, timeout, _environment(environment or {}))
        files = [Path(folder) / f"{rank}.json" for rank in range(workers)]
        if not all(file.exists() for file in files):
            missing = [rank for rank, file in enumerate(files) if not file.exists()]
            pytest.fail(f"ranks {missing} of {workers} left no result for {cases}; their output:\n{_of_ranks(log)}")
        return [json.loads(file.read_text()) for file in files]


def _environment(extra: dict[str, str]) -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ours = {"PATH": path, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "DGC_TIMEOUT": "60"}
    return {**os.environ, **ours, **extra}


def _run(command: list[str], timeout: float, environment: dict[str, str]) -> str:
    """Output of `command`; at the timeout, or on any exception, everything it started is killed."""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            return process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            _kill_tree(process.pid)
            log = process.communicate()[0]
            pytest.fail(f"{' '.join(command)} did not end within {timeout:g} s; output:\n{log[-6000:]}")
        except BaseException:
            _kill_tree(process.pid)
            raise


def _of_ranks(log: str) -> str:
    """What the ranks themselves printed, without the launcher's own noise."""
    return "\n".join(line for line in log.splitlines() if line.startswith("["))[-6000:]


def _kill_tree(pid: int) -> None:
    try:
        processes = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
