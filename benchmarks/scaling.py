"""Scaling efficiency from measured exchanges, and a model of it for more hosts than one machine can play.

Efficiency is ``throughput(N) / (N * throughput(1))``. For a job that computes for T a step and hides nothing of the
exchange E(N) behind it, that is ``T / (T + E(N))``.

The model, for N beyond those measured, n elements, k of them sent, a link of B bits a second::

    dense       E = 2*(N-1)/N * 4n * 8/B / r          r: what dense reached of B at the largest N measured
    compressed  E = C + D + (N-2)*k*d + 1 ms + bytes(N) * 8/B / r

C and D are compress and decode as measured at N = 2, where every rank has a core; d, nanoseconds for each element
received, is from `python -m benchmarks.kernels decode`; bytes(N) is what the packets really weigh.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.report import RESULTS
from dgc_horovod import DGCConfig
from dgc_horovod.launch.plan import link_bytes

COMPUTE_MS = 200.0
MODELLED = (16, 32, 64)
BITS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
_CYCLE_MS = 1.0

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
    dense, n = measured(rows, "dense"), rows[0]["parameters"]
    own = next((row for row in rows if row["method"] == method and row["workers"] == 2), None)
    if not dense or own is None:
        return {}
    bit_ms = 1e3 / BITS[rows[0]["rate"]]
    largest = max(dense)
    reached = _ring_bytes(n, largest) * 8 * bit_ms / dense[largest]
    if method == "dense":
        return {workers: _ring_bytes(n, workers) * 8 * bit_ms / reached for workers in MODELLED}
    local = own["phases_ms"]["compress"] + own["phases_ms"]["decode"] + _CYCLE_MS
    received_ms = density * n * _decode_nanoseconds() / 1e6
    return {
        workers: local
        + (workers - 2) * received_ms
        + link_bytes(n, DGCConfig(density=density), workers) * 8 * bit_ms / reached
        for workers in MODELLED
    }


def _workers(row: Row) -> int:
    return int(row["workers"])


def _ring_bytes(numel: int, workers: int) -> float:
    """Through one host's link, in each direction, of an fp32 ring allreduce."""
    return 2 * (workers - 1) / workers * 4 * numel


def _decode_nanoseconds() -> float:
    """For each element received from each rank, beyond zeroing; the most of those measured at the largest N."""
    rows = json.loads((RESULTS / "kernels-decode.json").read_text())["figures"]
    largest = max(map(_workers, rows))
    beyond = [
        (r["decode_ms"] + r["add_ms"] - r["zeroing_ms"]) / (r["workers"] * r["k"])
        for r in rows
        if r["workers"] == largest
    ]
    return float(1e6 * max(beyond))
