"""The rows of the exchange as tables and a plot: methods down, rates across; and hosts of several ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, markdown, plot, where

FILE = RESULTS / "exchange.json"
Row = dict[str, Any]
TITLES = {
    "resnet50": "ResNet-50",
    "vgg16": "VGG-16",
    "alexnet": "AlexNet",
    "lstm-ptb": "LSTM, PTB",
    "bert-base": "BERT-base",
}
NAMES = {"100mbit": "100 Mbps", "1gbit": "1 Gbps", "10gbit": "10 Gbps", "none": "not shaped", "here": "one machine"}

STYLES: dict[str, dict[str, Any]] = {
    "dense": {"color": "#444444", "marker": "o"},
    "fp16": {"color": "#999999", "marker": "o"},
    "torch DDP, PowerSGD 2": {"color": "#e69f00", "marker": "s", "linestyle": ":"},
    "published DGC": {"color": "#d55e00", "marker": "s"},
    "dgc": {"color": "#0072b2", "marker": "D", "linewidth": 2.2},
    "no exchange": {"color": "#bbbbbb", "marker": "", "linestyle": "--"},
}


def median(rows: Iterable[Row], method: str, rate: str) -> float | None:
    """Median milliseconds of a method at a rate, among rows of one model and N; None: not measured."""
    return next((row["ms"]["p50"] for row in where(rows, method=method, rate=rate)), None)


def milliseconds(value: float | None) -> str:
    """A time for a table."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(slow: float, fast: float) -> str:
    """How many times faster, for a table."""
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
        shown = []
        for rate in rates:
            own, dense = median(rows, method, rate), median(rows, "dense", rate)
            faster = f" ({ratio(dense, own)})" if own and dense and method != "dense" else ""
            shown.append(f"{milliseconds(own)}{faster}")
        first = min(where(rows, method=method), key=lambda row: rates.index(row["rate"]))
        lines.append([method, size(first["bytes"]), *shown])
    return markdown(head, lines)


def phases(rows: Sequence[Row], rate: str) -> str:
    """Where the step's time goes, of the methods that know, at one rate; milliseconds, medians over ranks and steps."""
    lines = []
    for row in (row for row in where(rows, rate=rate) if row["phases_ms"]):
        times = [row["phases_ms"][name] for name in ("compress", "wait", "decode")]
        place = f"{row['model']}, N = {row['workers']}, {row['method']}"
        lines.append([place, *map(milliseconds, (*times, row["ms"]["p50"]))])
    return markdown(["ms a step", "compress", "wait for the others", "decode", "whole step"], lines)


def in_launches(slower: Sequence[float], faster: Sequence[float]) -> str:
    """The median of ratios, each of the same launch, and their range."""
    ratios = [a / b for a, b in zip(slower, faster, strict=True)]
    return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"


def every_cell(kept: Mapping[str, Any]) -> str:
    """All tables of a file."""
    cells = [cell for cell in kept.values() if cell["rows"][0].get("ranks", 1) == 1]
    rows = [row for cell in sorted(cells, key=lambda cell: cell["rows"][0]["workers"]) for row in cell["rows"]]
    places = dict.fromkeys((row["model"], row["workers"]) for row in rows)
    found = [times(where(rows, model=model, workers=workers)) for model, workers in places]
    return "\n\n".join([*found, nodes(kept)]).strip()


def nodes(kept: Mapping[str, Any]) -> str:
    """Hosts of several ranks, a table a density: each exchange beside flat."""
    found = []
    cells = [cell for cell in kept.values() if cell["rows"][0].get("ranks", 1) > 1]
    for density, group in itertools.groupby(sorted(cells, key=_density), _density):
        rows = [row for cell in group for row in cell["rows"]]
        head = f"{rows[0]['model']}, {rows[0]['rate']}, density {density:g}"
        found.append(f"{head}\n\n{node_table(rows)}")
    return "\n\n".join(found)


def _density(cell: Mapping[str, Any]) -> float:
    return float(cell["density"])


def node_table(rows: Sequence[Row]) -> str:
    """The rows of one density."""
    lines = []
    for row in rows:
        flat = next(iter(where(rows, method="flat", workers=row["workers"])), None)
        ratios = ["", ""]
        if flat is not None and row["state_bytes"] and row is not flat:
            ratios[0] = in_launches(row["launch_medians_ms"], flat["launch_medians_ms"])
            ratios[1] = f"{row['bytes'] / flat['bytes']:.2f}×"
        state = f"{row['state_bytes'] / 1e6:.1f}" if row["state_bytes"] else ""
        name = f"{row['workers']} hosts of {row['ranks']}: {row['method']}"
        lines.append([name, f"{row['ms']['p50']:.1f}", ratios[0], f"{row['bytes'] / 1e3:,.0f}", ratios[1], state])
    head = ["", "ms a step", "time / flat", "kB a step from a host", "bytes / flat", "state of a rank, MB"]
    return f"{markdown(head, lines)}\n\n{len(rows[0]['launch_medians_ms'])} launches of each."


def draw_step_times(rows: Sequence[Row], models: Sequence[str], workers: int, file: Path) -> None:
    """Time of the exchange between so many workers over the link's rate, a panel a model."""
    shown = {model: where(rows, model=model, workers=workers) for model in models}
    titles = [f"{TITLES[model]}, {mine[0]['parameters'] / 1e6:.1f} M parameters" for model, mine in shown.items()]
    with plot(titles, "milliseconds a step", file) as panels:
        for axes, mine in zip(panels, shown.values(), strict=True):
            rates = [rate for rate in NAMES if any(row["rate"] == rate for row in mine) and rate != "here"]
            for method, style in STYLES.items():
                points = [(at, median(mine, method, rate)) for at, rate in enumerate(rates)]
                points = [point for point in points if point[1] is not None]
                if points:
                    axes.semilogy(*zip(*points, strict=True), label=method, **{**style, "markersize": 5})
            axes.set_xticks(range(len(rates)), [NAMES[rate] for rate in rates])
            axes.sharey(panels[0])
