"""The process that dgcrun starts a job in."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.helpers.jobs import ROOT


def said_by(code: str, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=20
    ).stdout


IGNORED = """
import os, signal, sys, threading, time
number = int(sys.argv[1])
signal.signal(number, signal.SIG_IGN)
from dgc_horovod.launch.job import Child
child = Child(lambda told: time.sleep(1) or 7)
child.tell("begin")
threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
print(child.wait())
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGHUP, 7), (signal.SIGINT, 128 + signal.SIGINT)],
    ids=["a hangup under nohup ends nothing", "an interrupt behind a script's & ends the job"],
)
def test_signals_that_were_ignored_before_it_began(number, code):
    assert said_by(IGNORED, str(int(number))) == f"{code}\n"


OTHER_THREAD = """
import signal, threading, time
from dgc_horovod.launch.job import Child
child = Child(lambda told: time.sleep(30) or 7)
child.tell("begin")
def signalled():
    time.sleep(0.5)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=signalled).start()
print(child.wait())
"""


def test_a_signal_that_another_thread_gets_ends_the_job():
    """The status server has threads of its own, and the system may choose any of them."""
    assert said_by(OTHER_THREAD) == f"{128 + signal.SIGTERM}\n"
