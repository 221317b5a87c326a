"""The rows of the exchange as tables: of one model and N, methods down, rates across."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report import markdown

Row = dict[str, Any]
NAMES = {"100mbit": "100 Mbps", "1gbit": "1 Gbps", "10gbit": "10 Gbps", "none": "not shaped", "here": "one machine"}


def median(rows: Iterable[Row], method: str, rate: str) -> float | None:
    """Median milliseconds of a method at a rate, among rows of one model and N; None: not measured."""
    return next((row["ms"]["p50"] for row in rows if (row["method"], row["rate"]) == (method, rate)), None)


def milliseconds(value: float | None) -> str:
    """A time for a table."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(slow: float | None, fast: float | None) -> str:
    """How many times faster, for a table."""
    if slow is None or fast is None:
        return ""
    return f"{slow / fast:.0f}×" if slow >= 10 * fast else f"{slow / fast:.1f}×"


def size(nbytes: float) -> str:
    """Bytes for a table."""
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 1e7 else f"{nbytes / 1e3:,.0f} kB"


def _in_order(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def times(rows: Sequence[Row]) -> str:
    """Milliseconds a step at each rate, bytes that leave a host, and how many times faster than dense each is.

    Args:
        rows: of one model and one N.
    """
    rates = [rate for rate in NAMES if rate in _in_order(rows, "rate")]
    head = [f"{rows[0]['model']}, N = {rows[0]['workers']}", "sent a step", *(NAMES[rate] for rate in rates)]
    lines = []
    for method in _in_order(rows, "method"):
        mine = sorted((row for row in rows if row["method"] == method), key=lambda row: rates.index(row["rate"]))
        shown = []
        for rate in rates:
            own, dense = median(rows, method, rate), median(rows, "dense", rate)
            faster = f" ({ratio(dense, own)})" if own and dense and method != "dense" else ""
            shown.append(f"{milliseconds(own)}{faster}")
        lines.append([method, size(mine[0]["bytes"]), *shown])
    return markdown(head, lines)


def phases(rows: Sequence[Row], rate: str) -> str:
    """Where the step's time goes, of the methods that know, at one rate; milliseconds, medians over ranks and steps."""
    known = [row for row in rows if row["rate"] == rate and row["phases_ms"]]
    return markdown(
        ["ms a step", "compress", "wait for the others", "decode", "whole step"],
        [
            [
                f"{row['model']}, N = {row['workers']}, {row['method']}",
                *(milliseconds(row["phases_ms"][name]) for name in ("compress", "wait", "decode")),
                milliseconds(row["ms"]["p50"]),
            ]
            for row in known
        ],
    )
