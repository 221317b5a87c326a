"""Makes the tables of the README, of pages in docs and of examples/README.md, and plots, from the files of results."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import auto, collectives, internet, scaling, scripts
from benchmarks.exchange import against, tables
from benchmarks.exchange.tables import NAMES, TITLES, Row, milliseconds, ratio
from benchmarks.kernels import __main__ as kernels
from benchmarks.quality import health
from benchmarks.quality import page as quality
from benchmarks.report import IMAGES, RESULTS, ROOT, markdown, read_results, where, write_into_page

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
    kept = read_results(tables.FILE)
    return [row for cell in kept.values() if cell["density"] == DENSITY for row in cell["rows"]]


def promises(rows: Sequence[Row]) -> str:
    """Each promised speed-up, and what was measured."""
    lines = []
    for model, workers, rate, method, times in PROMISES:
        mine = by_method(rows, model=model, workers=workers, rate=rate)
        if {"dgc", method} <= mine.keys():
            own, other = mine["dgc"]["ms"], mine[method]["ms"]["p50"]
            name = f"{TITLES[model]}, N = {workers}, {NAMES[rate]}: than {method}"
            between = " – ".join(milliseconds(own[part]) for part in ("p10", "p90"))
            found = f"{other / own['p50']:.1f}×{'' if other >= times * own['p50'] else ', MISSED'}"
            lines.append([name, milliseconds(other), milliseconds(own["p50"]), between, found, f"{times}×"])
    head = ["dgc is faster", "that method, ms", "dgc, ms", "dgc, 10th – 90th percentile", "speed-up", "aim"]
    return markdown(head, lines)


def by_method(rows: Sequence[Row], **fields: Any) -> dict[str, Row]:
    """The row of each method that has these fields."""
    return {row["method"]: row for row in where(rows, **fields)}


def alone(rows: Sequence[Row]) -> str:
    """Time of a step without a limit of the link: of one rank, which exchanges nothing, and of two."""
    lines = []
    for model, workers in itertools.product(TITLES, (1, 2)):
        mine = by_method(rows, model=model, workers=workers, rate="none")
        if {"dgc", "published DGC"} <= mine.keys():
            own, published = mine["dgc"], mine["published DGC"]
            times = (own["ms"]["p50"], own["phases_ms"]["compress"], published["ms"]["p50"])
            lines.append([f"{TITLES[model]}, N = {workers}", *map(milliseconds, times), ratio(times[2], times[0])])
    return markdown(["link not shaped", "dgc, ms", "of it compress", "published DGC, ms", "published DGC / dgc"], lines)


def links(kept: Mapping[str, Any]) -> str:
    """Throughput of the shaped links: nominal rate, one way alone, and each way with both busy."""
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


def machine(kept: Mapping[str, Any]) -> str:
    """Versions and processor."""
    names = ("horovod", "torch", "numpy", "python", "dgc-horovod")
    used = {
        f"Measured with {', '.join(f'{name} {each[name]}' for name in names)}, on {each['cores']} cores of "
        f"{each['processor']}, which all ranks share."
        for each in (figures["environment"] for figures in kept.values())
    }
    return "\n".join(sorted(used))


def without_horovod() -> str:
    """Our hook of DDP beside torch's own, and beside our Horovod adapter."""
    (found,) = read_results(RESULTS / "ddp.json").values()
    times = {row["method"]: (row["bytes"], row["ms"]["p50"]) for row in found["rows"]}
    own = times["dgc, DDP"][1]
    lines = [[name, tables.size(sent), milliseconds(ms), f"{ms / own:.2f}"] for name, (sent, ms) in times.items()]
    return markdown(["ResNet-50, 2 hosts, 1 Gbps", "sent a step", "ms a step", "time / dgc, DDP"], lines)


def readme_table(rows: Sequence[Row]) -> str:
    """README's table: one line a model, N = 2, 1 Gbps."""
    lines = []
    for model in TITLES:
        mine = by_method(rows, model=model, workers=2, rate="1gbit")
        if {"dense", "dgc"} <= mine.keys():
            own, dense = mine["dgc"], mine["dense"]
            shown = [milliseconds(mine[method]["ms"]["p50"]) if method in mine else "" for method in _README]
            name = f"{TITLES[model]}, {own['parameters'] / 1e6:.0f} M"
            faster, less = ratio(dense["ms"]["p50"], own["ms"]["p50"]), f"{dense['bytes'] / own['bytes']:,.0f}×"
            lines.append([name, *shown, faster, less])
    head = ["ms a step to exchange", *_README, "faster than dense", "fewer bytes"]
    return markdown(head, lines)


def _network() -> dict[str, str]:
    """Of docs/benchmarks-network.md, by marker."""
    kept, rows = read_results(tables.FILE), exchange_rows()
    cells = [where(rows, model=model, workers=n) for n, model in itertools.product((2, 4, 8), TITLES)]
    gigabit = where(rows, model=scaling.MODEL, workers=2, rate="1gbit")
    made = "Made by `python -m benchmarks.exchange`, drawn by `python -m benchmarks.page`."
    return {
        "machine": machine(kept),
        "links": links(kept),
        "promises": promises(rows),
        "exchange": "\n\n".join([*map(tables.times, filter(None, cells)), made]),
        "nodes": tables.nodes(read_results(RESULTS / "nodes.json")),
        "clusters": "\n\n".join(scaling.cluster_table(gigabit, density) for density in scaling.DENSITIES),
    }


def _kernels() -> dict[str, str]:
    """Of docs/benchmarks-kernels.md, by marker."""
    rows, kept = exchange_rows(), read_results(kernels.FILE)
    ours = [row for row in where(rows, workers=2) if row["method"] in ("dgc", "published DGC")]
    studies = {
        name: f"{kernels.table(name, kept)}\n\nMade by `python -m benchmarks.kernels {name}`."
        for name in kernels.STUDIES
    }
    return {
        "alone": alone(rows),
        "phases": tables.phases(ours, "1gbit"),
        "against": against.table(read_results(against.FILE)),
        **studies,
    }


def _planning() -> dict[str, str]:
    """Of docs/planning.md, by marker."""
    rows = exchange_rows()
    return {
        "predicted": scaling.summary(scaling.predict(rows, 2)),
        "latency": collectives.table(read_results(collectives.FILE)),
    }


def texts() -> dict[tuple[Path, str], str]:
    """The generated texts, by page and marker."""
    pages = {
        "README.md": {"benchmarks": readme_table(exchange_rows()), "quality": quality.in_short()},
        "docs/benchmarks-network.md": _network(),
        "docs/benchmarks-kernels.md": _kernels(),
        "docs/planning.md": _planning(),
        "docs/ddp.md": {"speed": without_horovod()},
        "docs/auto.md": {"cells": auto.table(read_results(auto.FILE))},
        "docs/internet.md": {"sooner": internet.table(read_results(internet.FILE))},
        "docs/quality.md": quality.texts(),
        "docs/tuning.md": {"health": health.table(read_results(health.KEPT))},
    }
    made = {(ROOT / page, marker): text for page, found in pages.items() for marker, text in found.items()}
    return made | scripts.texts()


def main() -> None:
    """Everything, from what is in benchmarks/results."""
    made, rows = texts(), exchange_rows()
    for (file, marker), text in made.items():
        write_into_page(file, marker, text)
    shown = [model for model in TITLES if len({row["rate"] for row in where(rows, model=model, workers=2)}) > 1]
    tables.draw_step_times(rows, shown, 2, IMAGES / "step_time.svg")
    quality.draw_losses(4, IMAGES / "quality_curves.svg")
    print(f"made anew: {', '.join(dict.fromkeys(str(file.relative_to(ROOT)) for file, _ in made))}, two plots")


if __name__ == "__main__":
    main()
