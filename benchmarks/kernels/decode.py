"""Time to check, decode and add up what N workers sent: with N*k it grows, with n only by the zeroing.

Beside it what the same number of additions in memory takes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.kernels.bench import Model, Scatter, timed, torch_threads
from benchmarks.report import markdown
from dgc_horovod import DGCConfig
from dgc_horovod.kernels.native.kernels import NativeKernels


def study(quick: bool) -> list[dict[str, Any]]:
    """N packets of k elements of one bucket of n; the same k from two sizes of n, and two k of the same n."""
    rows = []
    for millions, density in ((5, 0.001),) if quick else ((25, 0.001), (25, 0.004), (100, 0.001)):
        for workers in (2, 8) if quick else (2, 8, 32):
            rows.append(_row(millions * 10**6, density, workers))
    return rows


def _row(numel: int, density: float, workers: int) -> dict[str, Any]:
    config = DGCConfig(density=density, bucket_bytes=4 * numel)
    model = Model([("weight", (1000, numel // 1000))], config, NativeKernels(), workers)
    (engine,) = model.engines
    packets = []
    for _ in range(workers):  # packets of one step that differ: the same rank, over and over
        model.step = 1
        packets.append(model.compress()[0].payload.copy())
        model.gradients.advance()
    received, output = np.concatenate(packets), np.empty(numel, np.float32)
    engine.outputs.put(0, output)
    k = int(density * numel)
    scatters = [Scatter(numel, k, seed) for seed in range(workers)]

    def alone() -> None:
        output.fill(0)
        for scatter in scatters:
            scatter.add_to(output)

    with torch_threads(1):
        decode, add, zero, scattered = timed(
            lambda: engine.receive(received), lambda: engine.aggregate_into(1 / workers), lambda: output.fill(0), alone
        )
    times = {"decode_ms": decode, "add_ms": add, "zeroing_ms": zero, "scatter_ms": scattered}
    return {"n": numel, "k": k, "workers": workers, **times}


_OURS = ("decode_ms", "add_ms")


def nanoseconds_an_element(
    rows: list[dict[str, Any]], row: dict[str, Any], parts: Sequence[str] = _OURS
) -> float | None:
    """What each element costs that comes in beyond those of two workers, for which the zeroing is the same."""
    two = next(r for r in rows if (r["n"], r["k"], r["workers"]) == (row["n"], row["k"], 2))
    more = (row["workers"] - 2) * row["k"]
    return 1e6 * sum(row[part] - two[part] for part in parts) / more if more else None


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the parts, what NumPy takes to zero the update, and what each more element received costs."""
    lines = []
    for r in rows:
        each = nanoseconds_an_element(rows, r), nanoseconds_an_element(rows, r, ["scatter_ms"])
        name = f"n = {r['n'] // 10**6} M, k = {r['k']:,}, N = {r['workers']}"
        times = [f"{r[part]:.1f}" for part in (*_OURS, "zeroing_ms")]
        lines.append([name, *times, *("" if ns is None else f"{ns:.1f}" for ns in each)])
    more = "ns an element more", "of which memory alone"
    return markdown(["", "check, decode ms", "zero, add ms", "zeroing by NumPy ms", *more], lines)
