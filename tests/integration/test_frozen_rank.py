"""A rank that freezes for good, as on a host that hangs: the others end, and so does the launcher.

They had waited in Horovod's shutdown, over Gloo for half a minute and over MPI for ever, and `dgcrun` for a process
that hears no SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.jobs import ROOT, child_environment, kill_tree
from tests.helpers.launchers import torchrun

pytestmark = pytest.mark.parallel
TIMEOUT, LATER = 8, 10  # seconds: DGC_TIMEOUT, and what is promised beyond it
BUSY = 12  # seconds more, on a busy machine; what used to be took half a minute at least


def dgcrun(controller):
    return [
        sys.executable, "-m", "dgc_horovod.launch.cli", f"--{controller}", "-np", "2", "--dgc", "--density", "0.05",
    ]  # fmt: skip


def ends(starter, kind, folder):
    """Seconds from when a rank has frozen until the other one, and the launcher, have ended; and the output."""
    environment = child_environment({"DGC_TIMEOUT": str(TIMEOUT), "DGC_METRICS_FILE": str(folder / "m.jsonl")})
    command = [*starter, *([sys.executable] if "dgc_horovod.launch.cli" in starter else [])]
    command += ["-m", "tests.helpers.frozen_job", kind, str(folder)]
    with (folder / "log").open("w") as log, subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
    ) as job:  # fmt: skip
        try:
            wait_for(lambda: (folder / "frozen").exists(), 120, folder)
            begin, other = time.monotonic(), psutil.Process(int((folder / "pid.0").read_text()))
            wait_for(lambda: not is_alive(other), TIMEOUT + LATER + BUSY, folder)
            first = time.monotonic() - begin
            if kind != "ddp":  # torchrun itself waits 30 s for a process that hears no SIGTERM
                job.wait(max(0.1, begin + TIMEOUT + LATER + BUSY - time.monotonic()))
                assert job.returncode in (1, 128 + signal.SIGKILL), (
                    "mpirun's is that of whichever rank it sees end first"
                )
            return first, (folder / "log").read_text()
        finally:
            kill_tree(job.pid)
            with contextlib.suppress(OSError):
                os.kill(int((folder / "pid.1").read_text()), signal.SIGKILL)


def wait_for(condition, seconds, folder):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
        time.sleep(0.1)


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("kind", "controller"),
    [
        ("torch", "gloo"),
        pytest.param("torch", "mpi", marks=pytest.mark.slow),
        pytest.param("keras", "gloo", marks=pytest.mark.slow),
        pytest.param("keras", "mpi", marks=pytest.mark.slow),
        pytest.param("ddp", "", marks=pytest.mark.slow),
    ],
)
def test_nobody_waits_for_a_rank_that_is_frozen(kind, controller, tmp_path):
    first, log = ends(dgcrun(controller) if controller else torchrun(2), kind, tmp_path)
    assert first > TIMEOUT - 1 and "CollectiveTimeout" in log, log[-4000:]
    assert (tmp_path / "saved.0").exists() == (kind != "keras"), "what a script does with the error is done"
    assert (tmp_path / "handled.0").exists(), "and so are exit handlers"
    assert (tmp_path / "written.0").read_text(), "what was written is in its file"
    if controller:
        assert "(ended by an error)" in log and '"final": true' in (tmp_path / "m.jsonl").read_text()
