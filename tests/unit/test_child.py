"""The process that dgcrun starts a job in."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.helpers.jobs import ROOT

IGNORED = """
import os, signal, sys, threading, time
number = int(sys.argv[1])
signal.signal(number, signal.SIG_IGN)
from dgc_horovod.launch.child import Child
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
    began = [sys.executable, "-c", IGNORED, str(int(number))]
    ended = subprocess.run(began, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.stdout == f"{code}\n", ended


OTHER_THREAD = """
import signal, threading, time
from dgc_horovod.launch.child import Child
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
    ended = subprocess.run([sys.executable, "-c", OTHER_THREAD], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert ended.stdout == f"{128 + signal.SIGTERM}\n", ended
