"""One job of `dgcrun`: a launcher starts its ranks, they report to a status server here, and its end is looked at."""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import shlex
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dgc_horovod import __version__, envvars, tools
from dgc_horovod.launch import activation_check, settings, summary
from dgc_horovod.launch.child import Child
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.status_server import StatusServer

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")
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
    status.put(summary.END, None)  # it has its place, whoever may fill all others
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
    if code and status.get(activation_check.verdict(0)):
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
