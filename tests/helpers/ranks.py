"""Run cases on real Horovod ranks, started by ``horovodrun``: one JSON file per rank, the caller asserts.

A case is a function in ``tests/parallel/cases``, called on every rank; what it returns is written as JSON.
A launch that outlives its timeout, or loses a rank, is killed with all its children and fails.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.helpers.jobs import ROOT, child_environment, kill_tree, run

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
    fresh: bool = False,
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
        environment: more environment variables.
        fresh: whether the cases need processes of their own: they look at memory, or start Horovod with process sets.
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
    if controller == "gloo" and not (launcher_flags or environment or fresh):
        results = StandingRanks.of(workers, kind).run(cases, timeout)
        if results is not None:
            return results
    with tempfile.TemporaryDirectory(prefix="dgc-ranks-") as folder:
        command = _command(folder, workers, controller, launcher_flags)
        log = run([*command, *cases], timeout, {"DGC_TEST_KIND": kind, **(environment or {})}).output
        results = _results(Path(folder), 0, workers)
        if results is None:
            missing = [rank for rank in range(workers) if not _file(Path(folder), 0, rank).exists()]
            pytest.fail(f"ranks {missing} of {workers} left no result for {cases}; their output:\n{_of_ranks(log)}")
        return results


class StandingRanks:
    """Ranks that stay up and run what they are asked to, as long as nothing fails and nobody asks for others.

    There is one such set at a time: ranks of Horovod that wait take a tenth to a fifth of a core each.

    Args:
        workers: number of ranks.
        kind: "torch" or "keras": what they import.
    """

    _up: ClassVar[StandingRanks | None] = None

    def __init__(self, workers: int, kind: str) -> None:
        self._workers, self._kind, self._orders = workers, kind, itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="dgc-ranks-")
        self._path = Path(self._folder.name)
        environment = child_environment({"DGC_TEST_KIND": kind, "DGC_TEST_LAUNCHER": str(os.getpid())})
        with (self._path / "log").open("w") as log:
            self._process = subprocess.Popen(
                _command(self._folder.name, workers), cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @classmethod
    def of(cls, workers: int, kind: str) -> StandingRanks:
        """Those that are up, or new ones in their place."""
        if cls._up is None or (cls._up._workers, cls._up._kind) != (workers, kind):
            cls.end_any()
            cls._up = cls(workers, kind)
        return cls._up

    def run(self, cases: list[str], timeout: float) -> Results | None:
        """What `run_ranks` returns; None if a case failed, or took longer than `timeout` seconds: all end then."""
        number, deadline = next(self._orders), time.monotonic() + timeout
        order = self._path / f"{number}.part"
        order.write_text(json.dumps(cases))
        order.rename(order.with_suffix(".order"))
        try:
            while self._process.poll() is None and time.monotonic() < deadline:
                results = _results(self._path, number, self._workers)
                if results is not None:
                    return results
                time.sleep(0.01)
        except BaseException:
            self.end()
            raise
        print(f"{cases} failed on ranks that were up:\n{_of_ranks((self._path / 'log').read_text())}")
        self.end()
        return None

    def end(self) -> None:
        """Kill the ranks."""
        kill_tree(self._process.pid)
        self._process.wait()
        self._folder.cleanup()
        StandingRanks._up = None

    @classmethod
    def end_any(cls) -> None:
        """Kill those that are up."""
        if cls._up is not None:
            cls._up.end()


atexit.register(StandingRanks.end_any)


def _kind(cases: list[str]) -> str:
    return "keras" if all(case.startswith("keras_") for case in cases) else "torch"


def _command(folder: str, workers: int, controller: str = "gloo", flags: tuple[str, ...] = ()) -> list[str]:
    command = ["horovodrun", f"--{controller}", "-np", str(workers), *flags]
    if controller == "mpi":
        command += ["--mpi-args=--oversubscribe --allow-run-as-root"]
    return [*command, sys.executable, "-m", "tests.helpers.rank_main", folder]


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}.{rank}.json"


def _results(folder: Path, number: int, workers: int) -> Results | None:
    """What all ranks have written; None while one has not."""
    files = [_file(folder, number, rank) for rank in range(workers)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else None


def check_metrics_file(path: Path, method: str) -> None:
    """What ``DGC_METRICS_FILE`` has made of a run whose cases compress without `dgcrun`: rank 0's records alone."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["final"] for record in records] == [False] * (len(records) - 1) + [True]
    last = records[-1]
    assert last["method"] == method and last["steps"] > 0 and 0 < last["selected"] <= last["elements"]


def _of_ranks(log: str) -> str:
    """What the ranks themselves printed, without the launcher's own noise."""
    return "\n".join(line for line in log.splitlines() if line.startswith("["))[-6000:]
