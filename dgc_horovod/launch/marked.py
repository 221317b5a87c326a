"""A JSON answer at the end of a line, among whatever else a child process prints."""

from __future__ import annotations

import json
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
