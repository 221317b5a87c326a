"""Numbers as people read them."""

from __future__ import annotations

import math

_SPACE = "\u00a0"  # at which no line is broken


def size(nbytes: float) -> str:
    """Bytes, with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.3g}{_SPACE}{unit}"
        nbytes /= 1000
    return f"{nbytes:.4g}{_SPACE}TB"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    milli = 1000 * seconds
    return f"{milli:,.0f}{_SPACE}ms" if abs(milli) >= 10 else f"{milli:.2g}{_SPACE}ms"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{100 * share:.3g}%"


def count(number: float) -> str:
    """A whole number."""
    return f"{number:,.0f}"


def times_less(more: float, less: float) -> str:
    """How many times less than `more`."""
    return f"{more / less:.3g}× less" if less else "-"


def plain(number: float) -> str:
    """A number of any kind; "-" for none, which is NaN."""
    return "-" if math.isnan(number) else f"{number:.3g}"
