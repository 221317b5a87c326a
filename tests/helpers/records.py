"""Records of a run as `Recording` writes them, for tests of what is made of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS_A_RECORD = 50


def rank(number: int, host: str, steps: int, waits: float, step: float = 0.1) -> dict[str, Any]:
    """What a rank tells after `steps` timed steps, in each of which it waits so many seconds."""
    return {
        "rank": number,
        "host": host,
        "timed_steps": steps,
        "step_seconds": step * steps,
        "compress_seconds": 0.005 * steps,
        "decode_seconds": 0.003 * steps,
        "wait_seconds": waits * steps,
        "residual_ratio": 10.0 + number,
    }


def records(waits: Sequence[float], count: int = 6, host: str = "host", **last: Any) -> list[dict[str, Any]]:
    """The records of a run of ranks that wait so many seconds at every step; `last`: more in the last of them."""
    found = []
    for i in range(count):
        steps = STEPS_A_RECORD * i
        found.append({
            "time": 1e9 + 10 * i, "seconds": 10.0 * i, "version": "0.1.0", "method": "dgc", "final": i + 1 == count,
            "steps": steps, "elements": 10_000 * steps, "selected": 100 * steps, "bytes_sent": 400 * steps,
            "bytes_received": 1200 * steps, "bytes_inside_node": 0, "bytes_dense": 40_000 * steps,
            "bytes_dense_received": 60_000 * steps, "compress_seconds": 0.005 * steps, "decode_seconds": 0.003 * steps,
            "exchange_seconds": waits[0] * steps, "skipped": 0, "gradient_norm": 1.0, "residual_norm": 10.0,
            "residual_ratio": 10.0, "staleness_mean": 30.0 + i, "staleness_99": 200.0 + i, "overlap": 0.03,
            "replica_checks": i, "replica_mismatches": 0, "skips": [], "advice": [],
            "buckets": [{"elements": 10_000, "density": 0.01, "bytes": 400, "threshold": 0.5, "residual_norm": 10.0,
                         "age": 99, "compress_seconds": 0.1, "exchange_seconds": 0.2, "decode_seconds": 0.1}],
            "ranks": [rank(n, f"{host}{n}", max(0, steps - 1), wait) for n, wait in enumerate(waits)],
        })  # fmt: skip
    found[-1] |= last
    return found


def write(path: Path, *runs: list[dict[str, Any]]) -> str:
    """Put runs into a file, one after another; returns its path."""
    path.write_text("".join(json.dumps(record) + "\n" for run in runs for record in run))
    return str(path)
