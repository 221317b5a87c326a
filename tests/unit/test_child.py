"""The process that dgcrun starts a job in."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.jobs import ROOT

NOHUP = """
import os, signal, threading, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from dgc_horovod.launch.child import Child
child = Child(lambda told: time.sleep(1) or 7)
child.tell("begin")
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP)).start()
print(child.wait())
"""


def test_under_nohup_a_hangup_ends_nothing():
    ended = subprocess.run([sys.executable, "-c", NOHUP], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.stdout == "7\n", ended
