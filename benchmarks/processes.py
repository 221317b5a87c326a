"""Programs that are run to their end, or killed with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any


def ended_within(command: Sequence[str], seconds: float, **options: Any) -> tuple[int, str]:
    """Exit code and output of a command.

    Args:
        command: program and words.
        seconds: then it is killed with all that it started.
        options: more of what `subprocess.Popen` takes.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    with subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **options) as process:
        try:
            output = process.communicate(timeout=seconds)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # horovodrun's ranks are sessions of their own, and end with it
            raise
    return process.returncode, output
