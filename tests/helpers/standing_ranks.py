"""Ranks that stay up between tests: to start ranks takes longer than most cases do."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.helpers.jobs import ROOT, child_environment, kill_tree

Results = list[dict[str, Any]]  # one entry per rank: case name -> what it returned
Environment = dict[str, str]
_MOST = 6  # ranks at a time: each takes up to 0.7 GB
# A pause counts for a collective of Horovod's own that is under way.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
_WAKE = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; kill -CONT "$@"'  # once the launcher has gone


class StandingRanks:
    """Ranks that stay up and run what they are asked to, as long as nothing fails and nobody asks for others.

    A few such sets are up at a time. Ranks of Horovod that wait would take a fifth of a core each: they are stopped.

    Args:
        workers: number of ranks.
        kind: what they import and who starts them: "torch", "keras" or "ddp".
        command_of: function of a folder: the command that starts them, to serve what comes there.
    """

    _up: ClassVar[list[StandingRanks]] = []  # the one that was used last at the end
    started: ClassVar[int] = 0  # rank processes, those that end with their cases too

    def __init__(self, workers: int, kind: str, command_of: Callable[[str], list[str]]) -> None:
        self._workers, self._kind, self._orders = workers, kind, itertools.count()
        StandingRanks.started += workers
        self._folder = tempfile.TemporaryDirectory(prefix="dgc-ranks-")
        self._path = Path(self._folder.name)
        self._ranks: list[psutil.Process] = []  # that are stopped between orders
        self._guard: subprocess.Popen[bytes] | None = None
        own = {"DGC_TEST_KIND": kind, "DGC_TEST_LAUNCHER": str(os.getpid()), **_PATIENT}
        environment = child_environment(own)
        with (self._path / "log").open("w") as log:
            self._process = subprocess.Popen(
                command_of(self._folder.name), cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @classmethod
    def of(cls, workers: int, kind: str, command_of: Callable[[str], list[str]]) -> StandingRanks:
        """Those that are up, or new ones in the place of those that were not used for longest."""
        found = [each for each in cls._up if (each._workers, each._kind) == (workers, kind)]
        while not found and cls._up and sum(each._workers for each in cls._up) + workers > _MOST:
            cls._up[0].end()
        (wanted,) = found or [cls(workers, kind, command_of)]
        cls._up[:] = [*(each for each in cls._up if each is not wanted), wanted]
        return wanted

    def run(
        self, cases: list[str], timeout: float, folder: Path | None = None, environment: Environment | None = None
    ) -> Results | None:
        """What `run_ranks` returns; None if a case failed, or took longer than `timeout` seconds: all end then."""
        number, deadline = next(self._orders), time.monotonic() + timeout
        order = self._path / f"{number}.part"
        variables = {"DGC_TEST_FOLDER": str(folder or ""), **(environment or {})}
        order.write_text(json.dumps({"cases": cases, "environment": variables}))
        order.rename(order.with_suffix(".order"))
        self._each(psutil.Process.resume)
        try:
            while self._process.poll() is None and time.monotonic() < deadline:
                results = results_of(self._path, number, self._workers)
                if results is not None:
                    self._pause()
                    return results
                time.sleep(0.01)
        except BaseException:
            self.end()
            raise
        print((self._path / "log").read_text()[-6000:])
        warnings.warn(f"{cases} failed on ranks that were up, or took too long there: others start", stacklevel=3)
        self.end()
        return None

    def _pause(self) -> None:
        """Stop what waits for the next order; ranks of torchrun wait for free."""
        if self._kind != "ddp" and self._guard is None:
            every = psutil.Process(self._process.pid).children(recursive=True)
            self._ranks = [each for each in every if "tests.helpers.rank_main" in each.cmdline()[:4]]
            pids = [str(each.pid) for each in self._ranks]
            self._guard = subprocess.Popen(["sh", "-c", _WAKE, str(os.getpid()), *pids])
        self._each(psutil.Process.suspend)

    def _each(self, action: Callable[[psutil.Process], None]) -> None:
        for rank in self._ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                action(rank)

    def end(self) -> None:
        """Kill the ranks."""
        if self._guard is not None:
            kill_tree(self._guard.pid)
            self._guard.wait()
        kill_tree(self._process.pid)
        self._process.wait()
        self._folder.cleanup()
        StandingRanks._up[:] = [each for each in StandingRanks._up if each is not self]

    @classmethod
    def end_all(cls) -> None:
        """Kill those that are up."""
        for each in list(cls._up):
            each.end()


atexit.register(StandingRanks.end_all)


def result_file(folder: Path, number: int, rank: int) -> Path:
    """What a rank has written of the order of that number, counted from 0."""
    return folder / f"{number}.{rank}.json"


def results_of(folder: Path, number: int, workers: int) -> Results | None:
    """What all ranks have written; None while one has not."""
    files = [result_file(folder, number, rank) for rank in range(workers)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else None
