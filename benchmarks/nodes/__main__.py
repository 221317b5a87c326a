"""Emulated hosts of two ranks each, behind one card: time of a step, bytes on the card, memory. Needs root on Linux."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ranks
from benchmarks.exchange import gradients
from benchmarks.exchange.worker import Order
from benchmarks.netlab import NetlabError, lab
from benchmarks.nodes.worker import DENSE, FLAT, METHODS, NOTHING
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import RESULTS, environment, markdown, read_results, write_results
from benchmarks.shapes import SHAPES

FILE = RESULTS / "nodes.json"
_SECONDS = 1200


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__)
    made.add_argument("--model", choices=SHAPES, default="resnet50", metavar="M", help="default: %(default)s")
    made.add_argument("--hosts", nargs="+", type=int, default=[2, 4], metavar="M", help="default: 2 4")
    made.add_argument("--ranks", type=int, default=2, metavar="G", help="on each host (default: %(default)s)")
    made.add_argument("--rate", default="1gbit", metavar="R", help="of each card (default: %(default)s)")
    made.add_argument("--density", type=float, default=0.001, metavar="D", help="default: %(default)s")
    made.add_argument("--steps", type=int, default=20, metavar="S", help="timed, of each launch (default: %(default)s)")
    made.add_argument("--launches", type=int, default=3, metavar="L", help="default: %(default)s")
    made.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="W")
    made.add_argument("--file", type=Path, default=FILE, help=f"of results (default: benchmarks/results/{FILE.name})")
    return made


def measure(options: argparse.Namespace, hosts: int) -> list[dict[str, Any]]:
    """A row a method: medians over all launches, of the slowest rank of each step."""
    with tempfile.TemporaryDirectory() as folder, lab(hosts, options.rate, options.ranks) as up:
        gradients.write(Path(folder), [math.prod(shape) for _, shape in SHAPES[options.model]()])
        order = Order(
            options.model, tuple(options.methods), options.density, 0.0, 10, 1, options.steps, folder,
            up.addresses[0], "eth0",
        )  # fmt: skip
        workers, launches = hosts * options.ranks, []
        for _ in range(options.launches):
            ranks.launch("benchmarks.nodes.worker", [json.dumps(asdict(order))], workers, up, _SECONDS)
            files = [Path(folder, f"rank{rank}.json") for rank in range(workers)]
            launches.append([json.loads(file.read_text()) for file in files])
    return [
        _row(name, hosts, options, [[rank[name] for rank in each] for each in launches]) for name in options.methods
    ]


def _row(
    name: str, hosts: int, options: argparse.Namespace, launches: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    steps = [[max(times) for times in zip(*(rank["ms"] for rank in each), strict=True)] for each in launches]
    every = [rank for each in launches for rank in each]
    phases = {key: [ms for rank in every for ms in rank["phases_ms"][key]] for key in every[0]["phases_ms"]}
    return {
        "method": name,
        "hosts": hosts,
        "ranks": options.ranks,
        "ms": round(statistics.median(ms for each in steps for ms in each), 2),
        "launch_medians_ms": [round(statistics.median(each), 2) for each in steps],
        "card_bytes": round(statistics.mean(rank["card_bytes"] for rank in every)),
        "state_bytes": max(rank.get("state_bytes", 0) for rank in every),
        "rounds": every[0].get("rounds", []),
        "phases_ms": {key: round(statistics.median(values), 2) for key, values in phases.items()},
        "replicas": all(rank["replicas"] for rank in every),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown, each exchange beside flat: time by time of the same launch, their median and range."""
    lines = []
    for row in rows:
        flat = next((r for r in rows if r["method"] == FLAT and r["hosts"] == row["hosts"]), None)
        ratios = ["", ""]
        if row["method"] not in (NOTHING, DENSE, FLAT) and flat is not None:
            times = [a / b for a, b in zip(row["launch_medians_ms"], flat["launch_medians_ms"], strict=True)]
            ratios = [f"{statistics.median(times):.2f}× ({min(times):.2f}–{max(times):.2f})"]
            ratios.append(f"{row['card_bytes'] / flat['card_bytes']:.2f}×")
        lines.append(
            [
                f"{row['hosts']} hosts of {row['ranks']}: {row['method']}",
                f"{row['ms']:.1f}",
                ratios[0],
                f"{row['card_bytes'] / 1e3:,.0f}",
                ratios[1],
                f"{row['state_bytes'] / 1e6:.1f}" if row["state_bytes"] else "",
            ]
        )
    head = ["", "ms a step", "of flat", "kB a step out of a card", "of flat", "MB of u, v and remainder a rank"]
    return f"{markdown(head, lines)}\n\n{len(rows[0]['launch_medians_ms'])} launches of each."


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    try:
        rows = [row for hosts in options.hosts for row in measure(options, hosts)]
    except (NetlabError, LaunchError) as error:
        raise SystemExit(f"benchmarks.nodes: {error}") from None
    key = f"{options.model}, {options.rate}, density {options.density:g}"
    kept = read_results(options.file) if options.file.exists() else {}
    kept[key] = {"environment": environment(), "rows": rows}
    write_results(options.file, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    print(f"{key}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
