"""The planner's closed form beside the simulation of single messages, to 1,024 workers; a few minutes."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.command import Benchmark
from benchmarks.planning import simulation
from benchmarks.planning.scaling import specs
from benchmarks.report import RESULTS, complete, markdown, read_results, where
from dgc_horovod import DGCConfig
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import EXCHANGES, METHODS, traffic_of
from dgc_horovod.tools.plan_table import worker_counts

FILE = RESULTS / "planning.json"
MODEL, NODE_SIZES = "resnet50", (1, 4, 8)
RATES, LATENCIES, DENSITIES = (1e8, 1e9, 1e10), (20e-6, 1e-3, 40e-3), (0.001, 0.01)


def errors(method: str, workers: int, node_size: int) -> list[float]:
    """Relative deviations of the closed form over the links and densities."""
    found, machine = [], Machine(1.0).over_gloo()
    for rate, latency in itertools.product(RATES, LATENCIES):
        cluster = Cluster(workers, Link(rate, latency), node_size)
        for density in DENSITIES if method in EXCHANGES else DENSITIES[:1]:
            traffic = traffic_of(method, specs(MODEL), DGCConfig(density=density), cluster)
            found.append(traffic.seconds(cluster, machine) / simulation.seconds(traffic, cluster, machine) - 1)
    return found


def cell(workers: int, node_size: int) -> list[dict[str, Any]]:
    """A row for each method between so many workers."""
    rows = []
    for method in METHODS:
        if node_size > 1 or not method.startswith("hierarchical"):
            found = errors(method, workers, node_size)
            worst, middle = max(found, key=abs), statistics.median(map(abs, found))
            place = {"workers": workers, "node_size": node_size, "method": method, "points": len(found)}
            rows.append({**place, "median": round(middle, 5), "worst": round(worst, 5)})
    return rows


def measure(options: argparse.Namespace) -> None:
    """Every number of workers and size of nodes that is not kept yet."""
    places = [(count, size) for size in NODE_SIZES for count in worker_counts(size)]
    complete(options.file, {f"N = {count}, nodes of {size}": partial(cell, count, size) for count, size in places})


def table(kept: Mapping[str, Any]) -> str:
    """Worst deviation of the closed form by method and nodes, over all N, links and densities."""
    rows = [row for found in kept.values() for row in found["rows"]]
    rows.sort(key=lambda row: (row["workers"], row["node_size"]))
    sizes = sorted({row["node_size"] for row in rows})
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for size in sizes:
            mine = where(rows, method=method, node_size=size)
            worst = max(mine, key=lambda row: abs(row["worst"]), default=None)
            line.append(f"{100 * worst['worst']:+.1f}% (N = {worst['workers']:,})" if worst else "")
        lines.append(line)
    points, middle = sum(row["points"] for row in rows), statistics.median(row["median"] for row in rows)
    head = ["largest error", *(f"nodes of {size}" if size > 1 else "one worker a card" for size in sizes)]
    return f"{markdown(head, lines)}\n\n{points:,} points, median {middle:.1%}."


COMMAND = Benchmark("planning", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE)

if __name__ == "__main__":
    COMMAND.main()
