"""Scaling efficiency from measured exchanges, and a model of it for more hosts than one machine can play.

Efficiency is ``throughput(N) / (N * throughput(1))``. For a job that computes for T a step and hides nothing of the
exchange E(N) behind it, that is ``T / (T + E(N))``.

For N beyond those measured it is what two hosts took, and what the planner (`dgc_horovod.planning`) says of N more than
of two. At N = 2 there is a core for each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.kernels.decode import nanoseconds_an_element
from benchmarks.report import RESULTS, read_results
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.config import FLAT
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, cost

COMPUTE_MS = 200.0
MODELLED = (16, 32, 64)
BITS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}

Row = dict[str, Any]


def efficiency(exchange_ms: float, compute_ms: float = COMPUTE_MS) -> float:
    """Of a job whose step computes for `compute_ms` and then exchanges for `exchange_ms`."""
    return compute_ms / (compute_ms + exchange_ms)


def measured(rows: Sequence[Row], method: str) -> dict[int, float]:
    """N -> median milliseconds of the exchange.

    Args:
        rows: of one model and one rate.
        method: its name in the rows.
    """
    return {row["workers"]: row["ms"]["p50"] for row in sorted(rows, key=_workers) if row["method"] == method}


def modelled(rows: Sequence[Row], method: str, density: float) -> dict[int, float]:
    """N -> milliseconds of the exchange by the model above; empty where N = 2 was not measured.

    Args:
        rows: of one model and one rate.
        method: "dense" or "dgc".
        density: of what was measured.
    """
    at_two = measured(rows, method).get(2)
    if at_two is None:
        return {}
    tensors = specs(rows[0]["model"])
    config = DGCConfig(density=density)
    machine = Machine(COMPUTE_MS / 1e3, overlap=0.0, decode=decode_nanoseconds() / 1e9).over_gloo()

    def planned(workers: int) -> float:
        cluster = Cluster(workers, Link(BITS[rows[0]["rate"]]))
        found = cost(DENSE if method == "dense" else FLAT, tensors, config, cluster, machine)
        return 1e3 * (found.network_seconds + found.cpu_seconds)

    return {workers: at_two + planned(workers) - planned(2) for workers in MODELLED}


@functools.cache
def specs(model: str) -> tuple[TensorSpec, ...]:
    """A model's tensors."""
    return tuple(TensorSpec(name, tuple(shape)) for name, shape in SHAPES[model]())


def _workers(row: Row) -> int:
    return int(row["workers"])


def decode_nanoseconds() -> float:
    """For each element received from each rank; the most of those measured at the largest N."""
    rows = read_results(RESULTS / "kernels-decode.json")["figures"]
    largest = max(map(_workers, rows))
    return max(nanoseconds_an_element(rows, row) or 0.0 for row in rows if row["workers"] == largest)
