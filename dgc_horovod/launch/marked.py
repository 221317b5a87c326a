"""A child process that answers in JSON, at the end of a line, among whatever else it prints."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

MARK = "DGC_ANSWER "


def marked(output: str) -> Any | None:
    """What stands behind `MARK` in the last line that has it; None if there is none, or it is no JSON.

    What others print without an end of the line stands in front of it.
    """
    answers = [line.partition(MARK)[2] for line in output.splitlines() if MARK in line]
    try:
        return json.loads(answers[-1]) if answers else None
    except (ValueError, RecursionError):
        return None


def ask(command: Sequence[str], seconds: float) -> tuple[Any | None, str]:
    """Run a child process that prints an answer; returns the answer and "", or None and what is wrong with the process.

    Args:
        command: command line of the process, which gets no input.
        seconds: seconds within which it must have ended.
    """
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return None, f"it took more than {seconds:g} s"
    except OSError as error:
        return None, str(error)
    found = marked(ended.stdout)
    if found is not None:
        return found, ""
    if ended.returncode < 0:
        return None, f"it crashed with {signal.Signals(-ended.returncode).name}"
    said = ended.stderr.strip().splitlines() or ["no output"]
    return None, f"it ended with exit code {ended.returncode}: {said[-1]}"
