"""``dgcrun [FLAGS] torchrun ... train.py``: torch's launcher starts the ranks, with our settings as variables."""

from __future__ import annotations

import functools
import os
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from dgc_horovod import envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import job as one_job
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
    if job.active:
        envvars.put_on_path([FOLDER])
    start = functools.partial(os.execvp, args.command[0], args.command)  # in place of this process
    return one_job.run(args, job, "", one_job.Launcher(start, "DDP alone", ["127.0.0.1"], _why_silent))


def _why_silent(status: StatusServer) -> str:
    """Rank 0 tells it on its own host, which may be another."""
    return "" if status.heard_of else _NOBODY
