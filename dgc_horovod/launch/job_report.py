"""`dgcrun --report`: what is said of a job in its metrics file, and the page that is made of that file at the end."""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dgc_horovod import __version__, envvars
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch import settings
from dgc_horovod.launch.flags import REPORT
from dgc_horovod.launch.settings import Job
from dgc_horovod.metrics import is_json_lines
from dgc_horovod.report import output
from dgc_horovod.report.page import page
from dgc_horovod.report.records import Run, number, read

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")


def with_metrics(job: Job, path: str) -> Job:
    """`job` with the metrics file that a report is made of: one beside the page, if it has none.

    Args:
        job: resolved settings of the job.
        path: path of the page.

    Raises:
        ConfigError: nothing is compressed, its metrics go into another form, or the page cannot be written.
    """
    if not job.active:
        raise ConfigError(
            f"{REPORT} shows what compression did, and none was asked for; e.g. dgcrun --dgc {REPORT} ..."
        )
    given = next(setting for setting in job.settings if setting.variable is envvars.METRICS_FILE)
    if given.value and not is_json_lines(given.value):
        raise ConfigError(
            f"{REPORT} is made of JSON lines, and the metrics file is {given.text!r} ({given.source}); give it another "
            "name, or none"
        )
    try:
        output.check(path, given.value or "")
    except ConfigError as error:
        raise ConfigError(f"{REPORT}: {error}") from None
    if given.value:
        return job
    return job.with_setting(envvars.METRICS_FILE, output.metrics_beside(path), f"flag {REPORT}")


def describe(args: Any, job: Job, slots: str) -> dict[str, Any]:
    """What `dgcrun` knows of a job and no rank does; its ``id`` tells it from others in the same file.

    Args:
        args: Horovod's parsed arguments.
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


def write(job: Job, path: str, description: dict[str, Any]) -> None:
    """Write the page of a job that has ended, however it has; what goes wrong here changes no exit code."""
    metrics = job.get(envvars.METRICS_FILE)
    try:
        parts = [run for run in read(metrics) if run.job == description["id"]]
        if not parts:
            raise ConfigError(f"{metrics!r} holds nothing of this job")
        output.write(path, page(parts[-1]))
    except Exception as error:  # whatever matplotlib or an odd record may raise: the job's exit code is to be told
        said = error if isinstance(error, (ConfigError, OSError)) else f"{type(error).__name__}: {error}"
        _say(
            f"no report: {said}. Rank 0 writes that file, on its host; there: python -m dgc_horovod.report {metrics} "
            f"-o {path}"
        )
    else:
        _say(f"the report is {path}, made of {metrics}{_left_out(parts[:-1])}")


def _left_out(parts: Sequence[Run]) -> str:
    """What is said of the parts of a job before the last: each new process that becomes rank 0 counts anew."""
    if not parts:
        return ""
    steps = sum(number(part.last, "steps") for part in parts)
    return f"; rank 0 was replaced while it ran, and the {steps:,.0f} steps before are not in it"


def _say(text: str) -> None:
    print(f"dgcrun: {text}", file=sys.stderr, flush=True)
