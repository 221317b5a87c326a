"""The planner's closed form beside the simulation of single messages, to 1,024 workers; a few minutes."""

from __future__ import annotations

import itertools
import statistics
import time

from benchmarks.planning import simulation
from benchmarks.planning.tables import FILE
from benchmarks.report import save
from benchmarks.scaling import specs
from dgc_horovod import DGCConfig
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import EXCHANGES, METHODS, traffic_of
from dgc_horovod.tools.plan.show import worker_counts

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


def main() -> None:
    """Everything, into benchmarks/results."""
    rows, start = [], time.monotonic()
    for workers, node_size in sorted((count, size) for size in NODE_SIZES for count in worker_counts(size)):
        for method in METHODS:
            if node_size > 1 or not method.startswith("hierarchical"):
                found = errors(method, workers, node_size)
                worst, middle = max(found, key=abs), statistics.median(map(abs, found))
                place = {"workers": workers, "node_size": node_size, "method": method, "points": len(found)}
                rows.append({**place, "median": round(middle, 5), "worst": round(worst, 5)})
        print(f"N = {workers}, nodes of {node_size}: {time.monotonic() - start:.0f} s")
    save(FILE.stem, rows)


if __name__ == "__main__":
    main()
