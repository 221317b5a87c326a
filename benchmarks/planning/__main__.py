"""The planner's closed form beside the simulation of single messages, to 1,024 workers; a few minutes."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command import Benchmark
from benchmarks.planning import simulation
from benchmarks.planning.scaling import specs
from benchmarks.report import RESULTS, keep_all, markdown, read_results, where
from dgc_horovod import DGCConfig
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import EXCHANGES, METHODS, traffic_of
from dgc_horovod.tools.plan.show import worker_counts

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


def measure(options: argparse.Namespace) -> None:
    """Every method, number of workers and size of nodes."""
    rows, start = [], time.monotonic()
    for workers, node_size in sorted((count, size) for size in NODE_SIZES for count in worker_counts(size)):
        for method in METHODS:
            if node_size > 1 or not method.startswith("hierarchical"):
                found = errors(method, workers, node_size)
                worst, middle = max(found, key=abs), statistics.median(map(abs, found))
                place = {"workers": workers, "node_size": node_size, "method": method, "points": len(found)}
                rows.append({**place, "median": round(middle, 5), "worst": round(worst, 5)})
        print(f"N = {workers}, nodes of {node_size}: {time.monotonic() - start:.0f} s")
    keep_all(options.file, rows)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Worst deviation of the closed form by method and nodes, over all N, links and densities."""
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


COMMAND = Benchmark(
    "planning", __doc__ or "", measure, lambda options: table(read_results(options.file)["figures"]), FILE
)

if __name__ == "__main__":
    COMMAND.main()
