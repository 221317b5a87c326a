"""``dgcrun [FLAGS] torchrun ... train.py``: torch's launcher starts the ranks, with our settings as variables."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from dgc_horovod import envvars, tools
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import settings, summary
from dgc_horovod.launch.child import Child
from dgc_horovod.launch.settings import Job
from dgc_horovod.launch.site import FOLDER
from dgc_horovod.launch.status_server import StatusServer

_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "accelerate.commands.launch",
)
_NOBODY = (
    "no rank on this host has called torch.distributed.init_process_group() in a Python that has dgc_horovod installed"
)


def is_asked_for(words: Sequence[str]) -> bool:
    """Whether torch's launcher is to start the ranks: it is named, and Horovod's ``-np`` does not stand before it."""
    at = next((i for i, word in enumerate(words) if Path(word).name in _LAUNCHERS), None)
    return at is not None and not any(word.split("=")[0] in ("-np", "--num-proc") for word in words[:at])


def refuse_under_horovod(command: Sequence[str]) -> None:
    """Raise ConfigError for a launcher of torch as the command of each of Horovod's ranks."""
    if Path(command[0]).name in _LAUNCHERS:
        raise ConfigError(f"{command[0]} starts the ranks itself: leave -np out, and all other flags of horovodrun")


def run_job(args: Namespace, job: Job) -> int:
    """Run a job to its end, on this host; returns its exit code.

    Args:
        args: parsed arguments of `flags.parse_for_torch`.
        job: resolved settings of the job.

    Raises:
        ConfigError: its command does not exist; nothing was started.
    """
    if shutil.which(args.command[0]) is None:
        raise ConfigError(f"{args.command[0]} is not on PATH: activate the environment that has torch")
    envvars.put_into_environment(job.variables())
    if not job.active:
        print(f"dgcrun: {settings.show(job, 'DDP alone').splitlines()[0]}", file=sys.stderr)
        os.execvp(args.command[0], args.command)
    envvars.put_on_path([FOLDER])
    child = Child(lambda told: _become(args.command, told))
    status = StatusServer()  # after the fork: its thread would not survive one
    description = summary.describe(args, job, "")
    status.put(summary.RUN, description)
    status.put(summary.END, None)
    child.tell(f"{status.place(['127.0.0.1'])} {status.key}")
    code = child.wait()
    status.close()
    if args.report:
        tools.load("report.command").write_page(job, args.report, description)
    return code or _look_at_the_end(status, job)


def _become(command: list[str], told: str) -> int:
    """Replace this process by the command, whose ranks report to the status server of which it is told."""
    place, key = told.split()
    envvars.put_into_environment({envvars.STATUS_SERVER.name: place, envvars.STATUS_KEY.name: key})
    os.execvp(command[0], command)


def _look_at_the_end(status: StatusServer, job: Job) -> int:
    """The exit code of a job that has ended without an error: was it compressed? Rank 0 tells it on its own host."""
    end = status.get(summary.END)
    if isinstance(end, dict):
        reason = str(end.get("inactive", ""))
    else:
        reason = "" if status.heard_of or job.method == "none" else _NOBODY
        if reason:
            print(f"dgc_horovod: {summary.not_active(job, reason)}", file=sys.stderr, flush=True)
    return summary.EXIT_INACTIVE if reason and not job.get(envvars.ALLOW_INACTIVE) else 0
