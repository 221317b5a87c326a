"""What went wrong, as text that a rank can write down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def error_of(action: Callable[[], Any]) -> str:
    """Type and message of what `action` raises, or nothing."""
    try:
        action()
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""
