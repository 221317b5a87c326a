"""What went wrong, as text that a rank can write down; and a rank that stays away until another has been told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def error_of(action: Callable[[], Any]) -> str:
    """Type and message of what `action` raises, or nothing."""
    try:
        action()
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def error_told(action: Callable[[], Any], folder: Path) -> str:
    """`error_of`, on one rank; those that `stay_away` go on afterwards. All ranks give the same folder."""
    error = error_of(action)
    (folder / "told").touch()
    return error


def stay_away(folder: Path, most: float = 120.0) -> None:
    """Until another rank has its error, `most` seconds at most: who ends first would end Horovod for the others."""
    deadline = time.monotonic() + most
    while not (folder / "told").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
