"""Makes the tables of the README and of pages in docs from the JSON of the studies.

Two tables of the exchange, which show where its time goes, stand in docs/benchmarks-kernels.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import clusters, plots, scaling
from benchmarks.auto import tables as tables_of_auto
from benchmarks.collectives import tables as tables_of_collectives
from benchmarks.exchange import against, tables
from benchmarks.exchange.registry import FLOORS
from benchmarks.exchange.tables import NAMES, Row, median, milliseconds, ratio
from benchmarks.internet import tables as tables_of_internet
from benchmarks.nodes import __main__ as tables_of_nodes
from benchmarks.planning import tables as tables_of_planning
from benchmarks.planning import validation
from benchmarks.plots import IMAGES, TITLES
from benchmarks.quality import health
from benchmarks.quality import page as page_of_quality
from benchmarks.report import RESULTS, ROOT, markdown, read_results, write_into_page
from benchmarks.training import analysis, runs
from benchmarks.training import tables as tables_of_training

NETWORK, KERNELS = (ROOT / "docs" / f"benchmarks-{part}.md" for part in ("network", "kernels"))
README, PLANNING, DDP = ROOT / "README.md", ROOT / "docs" / "planning.md", ROOT / "docs" / "ddp.md"
AUTO, INTERNET = ROOT / "docs" / "auto.md", ROOT / "docs" / "internet.md"
_SECTION = "Made by `python -m benchmarks.exchange`, drawn by `python -m benchmarks.page`."
DENSITY = 0.001
_README = ("dense", "fp16", "torch DDP, fp16 hook", "published DGC", "dgc")
# What the project has promised: model, hosts, rate, slower method, how many times
PROMISES = (
    ("resnet50", 2, "1gbit", "dense", 30),
    ("resnet50", 2, "1gbit", "fp16", 20),
    ("resnet50", 2, "1gbit", "published DGC", 6),
    ("vgg16", 2, "1gbit", "dense", 30),
    ("vgg16", 2, "1gbit", "published DGC", 11),
    ("resnet50", 2, "10gbit", "dense", 10),
    ("resnet50", 4, "1gbit", "dense", 30),
)


def exchange_rows() -> list[Row]:
    """Every row of the exchange study."""
    kept = read_results(RESULTS / "exchange.json")
    return [row for cell in kept.values() if cell["density"] == DENSITY for row in cell["rows"]]


def cell(rows: Sequence[Row], model: str, workers: int, rate: str | None = None) -> list[Row]:
    """The rows of one model and one N, and of one rate if it is given."""
    return [
        row
        for row in rows
        if (row["model"], row["workers"]) == (model, workers) and rate in (None, row["rate"])
    ]  # fmt: skip


def promises(rows: Sequence[Row]) -> str:
    """What was to be shown, and what was measured."""
    lines = []
    for model, workers, rate, method, times in PROMISES:
        mine = cell(rows, model, workers, rate)
        own, other = median(mine, "dgc", rate), median(mine, method, rate)
        if own and other:
            name = f"{TITLES[model]}, N = {workers}, {NAMES[rate]}: than {method}"
            spread = " – ".join(milliseconds(_step(mine, "dgc")["ms"][part]) for part in ("p10", "p90"))
            found = f"{other / own:.1f}×{'' if other >= times * own else ', MISSED'}"
            lines.append([name, milliseconds(other), milliseconds(own), spread, found, f"{times}×"])
    return markdown(["dgc is faster", "ms", "dgc, ms", "its 10th – 90th percentile", "times", "aim"], lines)


def _step(rows: Sequence[Row], method: str) -> Row:
    return next(row for row in rows if row["method"] == method)


def alone(rows: Sequence[Row]) -> str:
    """What a step takes where no link is in the way: one rank and nobody to exchange with, two and no shaping."""
    lines = []
    for model in TITLES:
        for workers in (1, 2):
            mine = cell(rows, model, workers, "none")
            if {"dgc", "published DGC"} <= {row["method"] for row in mine}:
                own, published = _step(mine, "dgc"), _step(mine, "published DGC")
                times = (own["ms"]["p50"], own["phases_ms"]["compress"], published["ms"]["p50"])
                lines.append([f"{TITLES[model]}, N = {workers}", *map(milliseconds, times), ratio(times[2], times[0])])
    return markdown(["no limit to the link", "dgc, ms", "of that compress", "published DGC, ms", "times"], lines)


def links(kept: dict[str, Any]) -> str:
    """What the shaped links carry: nominal rate, one way alone, and each way with both busy."""
    found: dict[str, list[list[float]]] = {}
    for each in kept.values():
        if each["link_mbit"]:
            found.setdefault(each["rows"][0]["rate"], []).append(each["link_mbit"])
    lines = [
        [NAMES[rate], *(f"{statistics.median(column):,.0f}" for column in zip(*found[rate], strict=True))]
        for rate in NAMES
        if rate in found
    ]
    return markdown(["nominal", "one way alone, Mbit/s", "there, both ways busy", "back, both ways busy"], lines)


def machine(kept: dict[str, Any]) -> str:
    """What it was measured with."""
    names = ("horovod", "torch", "numpy", "python", "dgc-horovod")
    used = {
        f"Measured with {', '.join(f'{name} {each[name]}' for name in names)}, on {each['cores']} cores of "
        f"{each['processor']}, which all ranks share."
        for each in (figures["environment"] for figures in kept.values())
    }
    return "\n".join(sorted(used))


def losses(rows: Sequence[Row]) -> str:
    """Where dgc is no faster than the best of all that is not ours, in words."""
    worse = []
    places = dict.fromkeys((row["model"], row["workers"], row["rate"]) for row in rows if row["workers"] > 1)
    for model, workers, rate in places:
        mine = cell(rows, model, workers, rate)
        own = median(mine, "dgc", rate)
        others = [row for row in mine if row["method"] not in FLOORS and not row["method"].startswith("dgc")]
        best = min(others, key=lambda row: row["ms"]["p50"], default=None)  # type: ignore[no-any-return]
        if own and best and own >= best["ms"]["p50"]:
            place = f"{TITLES[model]}, N = {workers}, {NAMES[rate]}"
            worse.append(f"{place} ({milliseconds(own)} ms, {best['method']} {milliseconds(best['ms']['p50'])} ms)")
    return "; ".join(worse) + "." if worse else f"None of the {len(places)} that were measured."


def without_horovod() -> str:
    """Our hook of DDP beside torch's own, and beside our Horovod adapter."""
    rows = [row for found in read_results(RESULTS / "ddp.json").values() for row in found["rows"]]
    own = _step(rows, "dgc, DDP")["ms"]["p50"]
    lines = [
        [row["method"], tables.size(row["bytes"]), milliseconds(row["ms"]["p50"]), f"{row['ms']['p50'] / own:.2f}"]
        for row in rows
    ]
    return markdown(["ResNet-50, 2 hosts, 1 Gbps", "sent a step", "ms a step", "of our hook's"], lines)


def nodes() -> str:
    """Hosts of several workers: flat and hierarchical exchanges."""
    kept = read_results(RESULTS / "nodes.json")
    return "\n\n".join(f"{key}\n\n{tables_of_nodes.table(found['rows'])}" for key, found in kept.items())


def texts() -> dict[tuple[Path, str], str]:
    """What stands on the pages, by page and marker."""
    kept, rows, study = read_results(RESULTS / "exchange.json"), exchange_rows(), runs.load()
    cells = [cell(rows, model, n) for n in (2, 4, 8) for model in TITLES if cell(rows, model, n)]
    ours = [row for row in rows if row["method"] in ("dgc", "published DGC") and row["workers"] == 2]
    return {
        (NETWORK, "machine"): machine(kept),
        (NETWORK, "links"): links(kept),
        (NETWORK, "promises"): promises(rows),
        (KERNELS, "alone"): alone(rows),
        (NETWORK, "exchange"): "\n\n".join([*map(tables.times, cells), _SECTION]),
        (KERNELS, "phases"): tables.phases(ours, "1gbit"),
        (KERNELS, "against"): against.table(read_results(against.FILE)),
        (NETWORK, "nodes"): nodes(),
        (DDP, "speed"): without_horovod(),
        (AUTO, "cells"): tables_of_auto.table(read_results(tables_of_auto.FILE)),
        (INTERNET, "sooner"): tables_of_internet.sooner(read_results(tables_of_internet.FILE)),
        (NETWORK, "efficiency"): _efficiency(rows, DENSITY),
        (NETWORK, "clusters"): "\n\n".join(
            clusters.table(cell(rows, clusters.MODEL, 2, "1gbit"), d) for d in clusters.DENSITIES
        ),
        (NETWORK, "training"): f"{tables_of_training.study(study)}\n\nMade by `python -m benchmarks.training`.",
        (NETWORK, "losses"): losses(rows),
        (PLANNING, "predicted"): validation.summary(validation.predict(rows, 2)),
        (PLANNING, "predicted-cells"): validation.cells(validation.predict(rows, 2)),
        (PLANNING, "many"): validation.many(rows),
        (PLANNING, "latency"): tables_of_collectives.collectives(),
        (PLANNING, "simulated"): tables_of_planning.simulation(),
        (README, "benchmarks"): readme_table(rows),
        (NETWORK, "sooner"): sooner(analysis.rows(study["runs"])),
        **page_of_quality.texts(),
        **health.texts(),
    }


def draw() -> None:
    """The plots of the pages."""
    rows = exchange_rows()
    shown = [model for model in TITLES if len({row["rate"] for row in cell(rows, model, 2)}) > 1]
    plots.step_times(rows, shown, 2, IMAGES / "step_time.svg")
    plots.bytes_sent(rows, IMAGES / "bytes.svg")
    plots.efficiency(rows, "resnet50", ["1gbit", "10gbit"], DENSITY, IMAGES / "efficiency.svg")
    tables_of_auto.draw(read_results(tables_of_auto.FILE), IMAGES / "auto.svg")
    clusters.draw(cell(rows, clusters.MODEL, 2, "1gbit"), IMAGES / "clusters.svg")
    plots.quality(analysis.curves(runs.load()["runs"]), 2, IMAGES / "quality.svg")
    page_of_quality.draw()


def _efficiency(rows: Sequence[Row], density: float) -> str:
    lines = []
    for rate in ("1gbit", "10gbit"):
        mine = [row for row in rows if (row["model"], row["rate"]) == ("resnet50", rate)]
        for method in ("dense", "dgc"):
            known = {**scaling.measured(mine, method), **scaling.modelled(mine, method, density)}
            shown = [f"{scaling.efficiency(known[n]):.0%}" if n in known else "" for n in (2, 4, 8, *scaling.MODELLED)]
            lines.append([f"{NAMES[rate]}, {method}", *shown])
    head = ["", *(f"N = {n}" for n in (2, 4, 8)), *(f"N = {n}, modelled" for n in scaling.MODELLED)]
    return markdown(head, lines)


def readme_table(rows: Sequence[Row]) -> str:
    """README's table: one line a model, N = 2, 1 Gbps."""
    lines = []
    for model in TITLES:
        mine = cell(rows, model, 2, "1gbit")
        if {"dense", "dgc"} <= {row["method"] for row in mine}:
            own, dense = median(mine, "dgc", "1gbit"), median(mine, "dense", "1gbit")
            shown = [milliseconds(median(mine, m, "1gbit")) for m in _README]
            sent = _step(mine, "dense")["bytes"] / _step(mine, "dgc")["bytes"]
            name = f"{TITLES[model]}, {mine[0]['parameters'] / 1e6:.0f} M"
            lines.append([name, *shown, ratio(dense, own), f"{sent:,.0f}×"])
    head = ["ms a step to exchange", *_README, "faster than dense", "fewer bytes"]
    return markdown(head, lines)


def sooner(rows: Sequence[analysis.Row]) -> str:
    """How many times sooner dgc reaches the target than dense, a line a task; N = 2."""
    mine = [row for row in rows if (row.hosts, row.method) == (2, "dgc")]
    rates = [rate for rate in (runs.FAST, runs.SLOW) if any(row.rate == rate for row in mine)]
    lines = []
    for task in dict.fromkeys(row.task for row in mine):
        gains = {row.rate: f"{statistics.median(row.gain):.1f}×" for row in mine if row.task == task}
        lines.append([task, *(gains.get(rate, "") for rate in rates)])
    return markdown(["sooner than dense at that quality", *(NAMES[rate] for rate in rates)], lines)


def main() -> None:
    """Everything, from what is in benchmarks/results."""
    for (file, marker), text in texts().items():
        write_into_page(file, marker, text)
    draw()
    pages = dict.fromkeys(str(file.relative_to(ROOT)) for file, _ in texts())
    print(f"made anew: {', '.join(pages)} and their plots")


if __name__ == "__main__":
    main()
