"""Scaling efficiency from measured exchanges, and a model of it for more hosts than one machine can play.

Efficiency is ``throughput(N) / (N * throughput(1))``. For a job that computes for T a step and hides nothing of the
exchange E(N) behind it, that is ``T / (T + E(N))``.

The model, for N beyond those measured, n elements, k of them sent, a link of B bits a second::

    dense       E(N) = 2*(N-1)/N * 4n * 8/B / r             r: what dense reached of B at N = 2
    compressed  E(N) = E(2) + (N-2)*k*d + (bytes(N) - bytes(2)) * 8/B / r

At N = 2 there is a core for each rank. d, nanoseconds for each element received, is from
`python -m benchmarks.kernels decode`; bytes(N) is what the packets really weigh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.kernels.decode import nanoseconds_an_element
from benchmarks.report import RESULTS, read_results
from dgc_horovod import DGCConfig
from dgc_horovod.launch.doctor.cost_model import link_bytes

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
    at_two, dense_at_two = (measured(rows, name).get(2) for name in (method, "dense"))
    if at_two is None or dense_at_two is None:
        return {}
    n, bit_ms = rows[0]["parameters"], 1e3 / BITS[rows[0]["rate"]]
    byte_ms = dense_at_two / _ring_bytes(n, 2)  # that is 8/B/r
    assert byte_ms > 8 * bit_ms, "faster than the link"
    if method == "dense":
        return {workers: _ring_bytes(n, workers) * byte_ms for workers in MODELLED}
    config, received_ms = DGCConfig(density=density), density * n * decode_nanoseconds() / 1e6
    at = {workers: link_bytes(n, config, workers) for workers in (2, *MODELLED)}
    return {workers: at_two + (workers - 2) * received_ms + (at[workers] - at[2]) * byte_ms for workers in MODELLED}


def _workers(row: Row) -> int:
    return int(row["workers"])


def _ring_bytes(numel: int, workers: int) -> float:
    """Through one host's link, in each direction, of an fp32 ring allreduce."""
    return 2 * (workers - 1) / workers * 4 * numel


def decode_nanoseconds() -> float:
    """For each element received from each rank; the most of those measured at the largest N."""
    rows = read_results(RESULTS / "kernels-decode.json")["figures"]
    largest = max(map(_workers, rows))
    return max(nanoseconds_an_element(rows, row) or 0.0 for row in rows if row["workers"] == largest)
