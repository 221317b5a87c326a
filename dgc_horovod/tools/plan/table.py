"""Costs over the number of workers: which method is best from how many on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dgc_horovod.config import HIERARCHICAL, DGCConfig
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.planning.cluster import Cluster, Machine
from dgc_horovod.planning.cost_model import DENSE, EXCHANGES, FP16, METHODS, Cost, cost

MOST_WORKERS = 1024
_WORTH = 1.1  # times as fast as dense and fp16, or compression changes the training for little
_CLEARLY = 0.97  # of a simpler exchange's step must a more complicated one take at most

Table = Mapping[int, Sequence[Cost]]


def table(specs: Sequence[TensorSpec], config: DGCConfig, cluster: Cluster, machine: Machine) -> dict[int, list[Cost]]:
    """The cost of every method for two nodes, four, eight, and so on, of at most 1,024 workers together.

    Args:
        specs, config, machine: see `cost_model.cost`.
        cluster: links, and the number of workers of a node; that of all is not used.
    """
    methods = METHODS if cluster.node_size > 1 else [name for name in METHODS if not name.startswith(HIERARCHICAL)]
    return {
        workers: [cost(name, specs, config, replace(cluster, workers=workers), machine) for name in methods]
        for workers in worker_counts(cluster.node_size)
    }


def worker_counts(node_size: int) -> list[int]:
    """Numbers of workers that are planned: those of 2, 4, 8, ... nodes of `node_size` >= 1, at most 1,024."""
    found = [2 * node_size]
    while found[-1] <= MOST_WORKERS:
        found.append(2 * found[-1])
    return found[:-1]


def best(costs: Sequence[Cost]) -> Cost:
    """The exchange to take: of equal ones the simplest; dense or fp16 where compression gains less than a tenth."""
    plain = min((each for each in costs if each.name in (DENSE, FP16)), key=lambda each: each.step_seconds)
    chosen = plain
    for name in EXCHANGES:
        ours = next((each for each in costs if each.name == name), None)
        limit = plain.step_seconds / _WORTH if chosen is plain else _CLEARLY * chosen.step_seconds
        if ours is not None and ours.step_seconds <= limit:
            chosen = ours
    return chosen


def ranges(found: Table) -> list[tuple[int, int, str]]:
    """From and to how many workers which method is the one to take."""
    runs: list[tuple[int, int, str]] = []
    for workers, costs in found.items():
        name = best(costs).name
        if runs and runs[-1][2] == name:
            runs[-1] = (runs[-1][0], workers, name)
        else:
            runs.append((workers, workers, name))
    return runs
