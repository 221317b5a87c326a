"""What a metrics file holds after a run."""

from __future__ import annotations

import json
from pathlib import Path


def check_metrics_file(path: Path, method: str) -> None:
    """What ``DGC_METRICS_FILE`` has made of a run whose tests compress without `dgcrun`: rank 0's records alone."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["final"] for record in records] == [False] * (len(records) - 1) + [True]
    last = records[-1]
    assert last["method"] == method and last["steps"] > 0 and 0 < last["selected"] <= last["elements"]
