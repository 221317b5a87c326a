"""One job of `dgcrun`: a launcher starts its ranks, they report to a status server here, and its end is looked at.

The launcher is Horovod's (`launcher`), or torch's, with our settings as variables: ``dgcrun [FLAGS] torchrun ...``. It
runs in a child process, which over MPI turns into mpirun: signals reach it, nothing outlives us.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dgc_horovod import __version__, envvars, tools
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import reports, settings, summary
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.site import FOLDER
from dgc_horovod.launch.status_server import StatusServer

try:
    import psutil
except ImportError:  # Horovod brings it; torchrun ends what it has started by itself
    psutil = None  # type: ignore[assignment,unused-ignore]

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")
TORCHS_LAUNCHERS = (
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch",
)  # fmt: skip
_NOBODY = (
    "no rank on this host has called torch.distributed.init_process_group() in a Python that has dgc_horovod installed"
)
QUIET_SECONDS = 120.0  # after which a job of which nobody has heard is worth a word


class Launcher(NamedTuple):
    """How the ranks of a job are started, and what it means if they say nothing.

    Args:
        start: function that starts them, with the environment of this process; returns the exit code.
        stock: name of what trains where nothing is compressed.
        addresses: addresses of this machine at which they can reach it.
        why_silent: function that returns why nothing was compressed in a job that has ended without an error or
            a word of rank 0; "" where something was, or nobody can know.
        if_quiet: what is said after `QUIET_SECONDS` in which no rank has reported; "" for nothing.
    """

    start: Callable[[], int]
    stock: str
    addresses: Sequence[str]
    why_silent: Callable[[StatusServer], str]
    if_quiet: str = ""


def run(args: Namespace, job: Job, slots: str, launcher: Launcher) -> int:
    """Run a job to its end; returns its exit code.

    Args:
        args: parsed arguments.
        job: resolved settings of the job, which are in the environment.
        slots: hosts, as ``NAME:SLOTS,...``; "" where they are found while it runs.
        launcher: how it is started.
    """
    if not job.active:
        print(f"dgcrun: {settings.show(job, launcher.stock).splitlines()[0]}", file=sys.stderr)
        return launcher.start()

    def work(told: str) -> int:
        place, key = told.split()
        envvars.put_into_environment({envvars.STATUS_SERVER.name: place, envvars.STATUS_KEY.name: key})
        return launcher.start()

    child = Child(work)
    status = StatusServer()  # after the fork: its thread would not survive one
    description = describe(args, job, slots)
    status.put(summary.RUN, description)
    quiet = threading.Timer(QUIET_SECONDS, lambda: None if status.heard_of else say(launcher.if_quiet))
    quiet.daemon = True
    if launcher.if_quiet:
        quiet.start()
    child.tell(f"{status.place(launcher.addresses)} {status.key}")
    code = child.wait(lambda: status.get_all(summary.GIVEN_UP).values())
    quiet.cancel()
    status.close()
    if args.report:
        tools.load("report.command").write_page(job, args.report, description)
    if code and status.get(reports.verdict(0)):
        say("dgcrun: compression was not active on every rank, so every rank was stopped: see NotActivated above")
    return code or exit_code(status, job, launcher.why_silent)


def exit_code(status: StatusServer, job: Job, why_silent: Callable[[StatusServer], str]) -> int:
    """The exit code of a job that has ended without an error: was it compressed?

    Args:
        status: what the ranks have told.
        job: resolved settings of the job.
        why_silent: see `Launcher`.
    """
    end = status.get(summary.END)
    reason = end.get("inactive") if isinstance(end, dict) else None
    if not isinstance(reason, str):  # else rank 0 has told the user itself
        reason = "" if job.method == "none" else why_silent(status)
        if reason:
            say(f"dgc_horovod: {summary.not_active(job, reason)}")
    return summary.EXIT_INACTIVE if reason and not job.get(envvars.ALLOW_INACTIVE) else 0


def describe(args: Namespace, job: Job, slots: str) -> dict[str, Any]:
    """What `dgcrun` knows of a job and no rank does; its ``id`` tells it from others in the same file.

    Args:
        args: parsed arguments.
        job: resolved settings of the job.
        slots: hosts, as ``NAME:SLOTS,...``; "" where they are found while it runs.
    """
    return {
        "id": secrets.token_hex(8),
        "command": shlex.join(args.command),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "folder": str(Path.cwd()),
        "hosts": slots,
        "workers": args.num_proc,
        "versions": _versions(),
        "settings": settings.rows(job),
    }


def _versions() -> dict[str, str]:
    """Of the machine that `dgcrun` runs on; hosts are checked to have the same version of dgc_horovod."""
    found = {"dgc_horovod": __version__, "python": platform.python_version(), "machine": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def say(text: str) -> None:
    """Print a line for the user."""
    print(text, file=sys.stderr, flush=True)


def is_for_torch(words: Sequence[str]) -> bool:
    """Whether torch's launcher is to start the ranks: it is named, and Horovod's ``-np`` does not stand before it."""
    at = next((i for i, word in enumerate(words) if Path(word).name in TORCHS_LAUNCHERS), None)
    return at is not None and not any(word.split("=")[0] in ("-np", "--num-proc") for word in words[:at])


def run_for_torch(args: Namespace, job: Job) -> int:
    """Run a job to its end, on this host; returns its exit code.

    Args:
        args: parsed arguments of `cli.parse_for_torch`.
        job: resolved settings of the job.

    Raises:
        ConfigError: its command does not exist; nothing was started.
    """
    if shutil.which(args.command[0]) is None:
        raise ConfigError(f"{args.command[0]} is not on PATH: activate the environment that has torch")
    envvars.put_into_environment(job.variables())
    if job.active:
        envvars.put_on_path([FOLDER])
    start = functools.partial(os.execvp, args.command[0], args.command)  # in place of this process
    return run(args, job, "", Launcher(start, "DDP alone", ["127.0.0.1"], _why_silent))


def _why_silent(status: StatusServer) -> str:
    """Rank 0 tells it on its own host, which may be another."""
    return "" if status.heard_of else _NOBODY


# -- its launcher, a child process

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
