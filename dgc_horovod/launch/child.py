"""A child process for Horovod's launcher, which over MPI turns into mpirun: signals reach it, nothing outlives us.

And any child process that answers in JSON, at the end of a line, among whatever else it prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

try:
    import psutil
except ImportError:  # Horovod brings it; torchrun ends what it has started by itself
    psutil = None  # type: ignore[assignment,unused-ignore]

MARK = "DGC_ANSWER "  # in front of the answer, among whatever else a child process prints
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_LOOK_EVERY = 0.1  # seconds
_RANKS_KILLED_AFTER, _KILLED_AFTER = 10.0, 30.0  # seconds; Horovod gives its ranks 5 to end
_FROZEN_KILLED_AFTER = 4.0  # seconds, in which those that can hear it end by the signal that Horovod, or mpirun, sends


class Child:
    """Runs ``work(told)`` in a session of its own, once it is told something.

    Args:
        work: function that takes what it is told and returns an exit code.
    """

    def __init__(self, work: Callable[[str], int]) -> None:
        reading, self._writing = os.pipe()
        self._ended_by: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            os.setsid()  # over MPI a shell starts mpirun: a signal has to reach both
            with os.fdopen(reading) as pipe:
                told = pipe.read()
            sys.exit(work(told) if told else 1)  # we may have died
        os.close(reading)
        self._guard()

    def _guard(self) -> None:
        """A process that does nothing but outlive us, and then end the child: nobody can catch SIGKILL."""
        held, self._held = os.pipe()
        self._guard_pid = os.fork()
        if self._guard_pid == 0:
            os.close(self._held)
            os.close(self._writing)
            os.setsid()
            if not os.read(held, 1):  # we have died
                _end(self.pid)
            os._exit(0)
        os.close(held)

    def tell(self, text: str) -> None:
        """Let it begin. `text`: for `work`."""
        with os.fdopen(self._writing, "w") as pipe:
            pipe.write(text)

    def wait(self, given_up: Callable[[], Collection[Any]] = tuple) -> int:
        """Wait for its end; returns its exit code, 128 + n if signal n was to end it. Signals are passed on.

        Args:
            given_up: function that gives the processes of ranks that end because another does not come. That one may be
                frozen, and hear no signal but SIGKILL.
        """
        heard = set(_PASSED_ON)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup; SIGINT is ignored behind any script's "&" too
            heard.discard(signal.SIGHUP)
        before = {number: signal.signal(number, self._pass_on) for number in heard}
        try:
            is_told = False
            while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
                if not is_told and given_up():
                    is_told = True
                    _later(_FROZEN_KILLED_AFTER, self._kill_all_but, given_up)
                time.sleep(_LOOK_EVERY)  # one long wait would go on where the system gives a signal to another thread
            status = ended[1]
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            with contextlib.suppress(OSError):  # somebody has killed the guard
                os.write(self._held, b".")
            os.waitpid(self._guard_pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if self._ended_by is not None:
            print(f"dgcrun: stopped by {signal.Signals(self._ended_by).name}", file=sys.stderr, flush=True)
            return 128 + self._ended_by
        return code if code >= 0 else 128 - code

    def _kill_all_but(self, given_up: Callable[[], Collection[Any]]) -> None:
        """Kill the ranks, but for those that end by themselves; whoever starts ranks is to tell how each has ended."""
        ranks = [rank for starter in _below(self.pid, recursive=False) for rank in _below(starter.pid)]
        _kill([rank for rank in ranks if rank.pid not in given_up()])

    def _pass_on(self, number: int, frame: Any) -> None:
        if number in _ENDING and self._ended_by is None:
            self._ended_by = number
            _later(_RANKS_KILLED_AFTER, _kill, _below(self.pid))
            _later(_KILLED_AFTER, _signal, self.pid, signal.SIGKILL)
        _signal(self.pid, number)


def _later(seconds: float, act: Callable[..., Any], *given: Any) -> None:
    timer = threading.Timer(seconds, act, given)
    timer.daemon = True
    timer.start()


def _end(pid: int) -> None:
    begin, below = time.monotonic(), _below(pid)
    there = _signal(pid, signal.SIGTERM)
    while there and time.monotonic() < begin + _KILLED_AFTER:
        time.sleep(0.2)
        there = _signal(pid, 0)
        if time.monotonic() > begin + _RANKS_KILLED_AFTER:
            _kill(below)
    _kill(below)
    _signal(pid, signal.SIGKILL)


def _below(pid: int, recursive: bool = True) -> list[psutil.Process]:
    """Every process that the child has started, ranks and theirs: Horovod leaves behind what an ended rank started."""
    if psutil is None:
        return []
    try:
        return psutil.Process(pid).children(recursive=recursive)  # type: ignore[no-any-return]
    except (psutil.Error, OSError):
        return []


def _kill(processes: list[psutil.Process]) -> None:
    """End those that are still there; a number that another process has by now is left alone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _signal(pid: int, number: int) -> bool:
    """Send a signal to the child's process group; returns whether there is one."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return False
    return True


def marked(output: str) -> Any | None:
    """The JSON behind `MARK` in the last line of `output` that has it; None if there is none, or it is no JSON.

    What others print without an end of the line stands in front of it.
    """
    answers = [line.partition(MARK)[2] for line in output.splitlines() if MARK in line]
    try:
        return json.loads(answers[-1]) if answers else None
    except (ValueError, RecursionError):
        return None


def ask(command: Sequence[str], seconds: float) -> tuple[Any | None, str]:
    """Run a child process that prints an answer; returns the answer and "", or None and what is wrong with the process.

    Args:
        command: command line of the process, which gets no input.
        seconds: seconds within which it must have ended.
    """
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, f"it took more than {seconds:g} s"
    except OSError as error:
        return None, str(error)
    found = marked(ended.stdout)
    if found is not None:
        return found, ""
    if ended.returncode < 0:
        return None, f"it crashed with {signal.Signals(-ended.returncode).name}"
    said = ended.stderr.strip().splitlines() or ["no output"]
    return None, f"it ended with exit code {ended.returncode}: {said[-1]}"
