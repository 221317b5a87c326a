"""A JSON answer on a line of its own, among whatever else a child process prints."""

from __future__ import annotations

import json
from typing import Any


def marked(output: str, mark: str) -> Any | None:
    """What stands behind `mark` in the last line that begins with it; None if there is none, or it is no JSON."""
    lines = [line for line in output.splitlines() if line.startswith(mark)]
    try:
        return json.loads(lines[-1].removeprefix(mark)) if lines else None
    except (ValueError, RecursionError):
        return None
