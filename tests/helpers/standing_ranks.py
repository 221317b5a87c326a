"""Ranks that stay up between tests: to start ranks takes longer than most tests do."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import psutil

from tests.helpers.jobs import ROOT, child_environment, kill_tree
from tests.helpers.outcomes import LEAVE, Order, Outcome, read, write

_MOST = 6  # ranks at a time: each takes up to 0.7 GB
_AFTER_AN_ERROR = 5.0  # seconds that the other ranks have: they may wait for the one that has it
# A pause counts for a collective of Horovod's own that is under way.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
_WAKE = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; kill -CONT "$@"'  # once the launcher has gone


class StandingRanks:
    """Ranks that carry out one order after another.

    A few such sets are up at a time. Ranks of Horovod that wait would take a fifth of a core each: they can be stopped.

    Args:
        workers: number of ranks.
        kind: what they import and who starts them: "torch", "keras" or "ddp".
        command_of: function of a folder and the kind: the command that starts them, to serve what comes there.
        variables: of their environment, from their start on.
    """

    _up: ClassVar[list[StandingRanks]] = []  # the one that was used last at the end
    started: ClassVar[int] = 0  # rank processes

    def __init__(
        self, workers: int, kind: str, command_of: Callable[[str, str], list[str]], variables: Mapping[str, str]
    ) -> None:
        self._workers, self._kind, self._orders = workers, kind, itertools.count()
        StandingRanks.started += workers
        self._folder = tempfile.TemporaryDirectory(prefix="dgc-ranks-")
        self._path = Path(self._folder.name)
        self._ranks: list[psutil.Process] = []  # that are stopped between orders
        self._guard: subprocess.Popen[bytes] | None = None
        environment = child_environment({"DGC_TEST_LAUNCHER": str(os.getpid()), **variables})
        with (self._path / "log").open("w") as log:
            self._process = subprocess.Popen(
                command_of(self._folder.name, kind), cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @classmethod
    def of(cls, workers: int, kind: str, command_of: Callable[[str, str], list[str]]) -> StandingRanks:
        """Those that are up, or new ones in the place of those that were not used for longest."""
        found = [each for each in cls._up if (each._workers, each._kind) == (workers, kind)]
        while not found and cls._up and sum(each._workers for each in cls._up) + workers > _MOST:
            cls._up[0].end()
        (wanted,) = found or [cls(workers, kind, command_of, _PATIENT)]
        cls._up[:] = [*(each for each in cls._up if each is not wanted), wanted]
        return wanted

    def call(self, order: Order) -> list[Outcome | None]:
        """How it ended on each rank; None where a rank has died, was too slow, or waited for one with an error."""
        number = next(self._orders)
        self._each(psutil.Process.resume)
        write(self._path / f"{number}.order", order)
        deadline = time.monotonic() + order.timeout
        while True:
            outcomes = [read(self._path / f"{number}.{rank}.outcome") for rank in range(self._workers)]
            ended = self._process.poll() is not None
            if ended or all(outcomes) or time.monotonic() > deadline:
                return outcomes
            if any(each and each.error for each in outcomes):
                deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR)
            time.sleep(0.01)

    def leave(self) -> int | None:
        """Let the ranks end by themselves; returns the launcher's exit code, None if they did not within a minute."""
        write(self._path / f"{next(self._orders)}.order", LEAVE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(60)
        return None

    def log(self) -> str:
        """What the launcher and the ranks have printed."""
        return (self._path / "log").read_text(errors="replace")

    def pause(self) -> None:
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
