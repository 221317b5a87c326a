"""Run a command with a time limit; whatever it has started is killed if it does not end by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


# For ranks: on how many command lines of this machine the key of dgcrun's status server stands, for everybody's ps.
KEY_SEEN = """
import glob, os
def read(path):
    try: return open(path, 'rb').read()
    except OSError: return b''
lines = [read(path) for path in glob.glob('/proc/[0-9]*/cmdline')]
seen = [line.decode() for line in lines if os.environ['DGC_STATUS_KEY'].encode() in line]
print('key seen', seen, 'of', len(lines) > 2)
"""


class Finished(NamedTuple):
    """How a command ended, and what it printed (stdout and stderr together)."""

    code: int
    output: str


def run(command: Sequence[str], timeout: float = 120, environment: dict[str, str | None] | None = None) -> Finished:
    """Run `command` in the checkout; at the timeout, or on any exception, everything it started is killed.

    Args:
        command: a list of words.
        timeout: in seconds; past it the test fails.
        environment: more variables; None removes one.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=child_environment(environment or {}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            return Finished(output=process.communicate(timeout=timeout)[0], code=process.returncode)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            log = process.communicate()[0]
            pytest.fail(f"{' '.join(command)} did not end within {timeout:g} s; output:\n{log[-6000:]}")
        except BaseException:
            kill_tree(process.pid)
            raise


def child_environment(extra: dict[str, str | None]) -> dict[str, str]:
    """This environment for ranks on a small machine, with `extra`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ours = {"PATH": path, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "DGC_TIMEOUT": "60"}
    return {name: text for name, text in {**os.environ, **ours, **extra}.items() if text is not None}


def kill_tree(pid: int) -> None:
    """Kill a process and all its children."""
    try:
        processes = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
