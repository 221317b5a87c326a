"""The figures of the study of selection as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.quality.selection import MOMENTS
from benchmarks.report import markdown


def vectors(rows: Sequence[dict[str, Any]]) -> str:
    """The remainder on Gaussian vectors beside the bounds."""
    lines = []
    for row in rows:
        below = 1 - row["k"] / row["numel"]
        found = (row["exact"], below**2, row["gaussian"], row["sampled"], row["random"], below)
        lines.append([f"{row['k']:,}", *(f"{value:.5f}" for value in found)])
    return markdown(["k of 100,000", "top-k", "(1 - k/d)²", "gaussian", "sampled", "random", "1 - k/d"], lines)


def gradients(kept: dict[str, list[dict[str, Any]]]) -> str:
    """What top-k leaves of gradients and residuals at the moments of a run that were looked at."""
    lines = []
    for name, rows in kept.items():
        for tensor in dict.fromkeys(row["tensor"] for row in rows):
            mine = [row for row in rows if row["tensor"] == tensor]
            below = 1 - mine[0]["k"] / mine[0]["numel"]
            left = [f"{row['remainder']:.4f}" for row in mine]
            tails = " ".join(f"{row['kurtosis']:.1f}" for row in mine)
            lines.append([f"{name}, {tensor}", *left, f"{below**2:.4f}", f"{below:.4f}", tails])
    moments = [f"{moment:.0%}" for moment in MOMENTS]
    return markdown(["left by top-k", *moments, "(1 - k/d)²", "1 - k/d", "kurtosis"], lines)
