"""Seconds and bytes for people."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``0.0123`` -> "12.3 ms"."""
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.02 else f"{1e3 * seconds:.1f} ms"


def size(nbytes: float) -> str:
    """``1500000`` -> "1.5 MB"."""
    unit, name = next(((u, n) for u, n in ((10**9, "GB"), (10**6, "MB")) if nbytes >= u), (10**3, "kB"))
    return f"{nbytes / unit:,.1f} {name}"
