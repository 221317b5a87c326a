"""One cell of the study: model, number of hosts, rate; all methods in one launch. Cells are kept as they come."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ranks
from benchmarks.exchange.worker import Order
from benchmarks.netlab import Lab
from benchmarks.report import environment, read_results, write_results
from benchmarks.shapes import SHAPES, numel

HERE = "here"  # the rate of ranks on this machine, with no emulated hosts
_TIMEOUT_SECONDS = 3_000


@dataclass(frozen=True)
class Cell:
    """What one launch measures.

    Args:
        model: whose shapes.
        workers: N, one on each host.
        rate: of the hosts' links, nominal.
        density: of what compresses.
    """

    model: str
    workers: int
    rate: str
    density: float

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        return f"{self.model}, N={self.workers}, {self.rate}, density {self.density:g}"


def read(file: Path) -> dict[str, Any]:
    """The cells that have been measured, by their keys."""
    return read_results(file) if file.exists() else {}  # type: ignore[no-any-return]


def keep(file: Path, cell: Cell, figures: dict[str, Any]) -> None:
    """Put a cell into the file of results, in the place of what was there: the rows of a cell are of one run."""
    write_results(file, json.dumps(dict(sorted({**read(file), cell.key: figures}.items())), indent=1) + "\n")


def methods(kept: dict[str, Any], cell: Cell) -> set[str]:
    """What has been measured in a cell of those that `read` gave."""
    return {row["method"] for row in kept[cell.key]["rows"]} if cell.key in kept else set()


def measure(cell: Cell, order: Order, hosts: Lab | None, launches: int) -> dict[str, Any]:
    """Launch the ranks of a cell, and again, so that no moment of a noisy machine decides; wait for them.

    Args:
        cell: what to measure.
        order: for the ranks; its folder has the model's gradients.
        hosts: that are up; None: ranks on this machine.
        launches: how many; the steps of all count alike.

    Raises:
        LaunchError: a launch failed or did not end; nothing of it is left running.
    """
    link = [hosts.one_way(), *hosts.measure([(1, 2), (2, 1)])] if hosts and cell.workers > 1 else []
    found = [_launch(cell, order, hosts) for _ in range(launches)]
    return {
        "environment": environment(),
        "link_mbit": [round(rate) for rate in link],
        "density": cell.density,
        "rows": [_row(cell, name, [[rank[name] for rank in one] for one in found]) for name in order.methods],
    }


def _launch(cell: Cell, order: Order, hosts: Lab | None) -> list[dict[str, Any]]:
    """Each rank's figures, by the names of the methods."""
    files = [Path(order.folder, f"rank{rank}.json") for rank in range(cell.workers)]
    for file in files:  # of another launch
        file.unlink(missing_ok=True)
    ranks.launch("benchmarks.exchange.worker", [json.dumps(asdict(order))], cell.workers, hosts, _TIMEOUT_SECONDS)
    return [json.loads(file.read_text()) for file in files]


def _row(cell: Cell, method: str, launches: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What JSON has of a method: a step is over when the slowest rank has finished it."""
    steps = [[max(times) for times in zip(*(rank["ms"] for rank in one), strict=True)] for one in launches]
    ordered, every = sorted(itertools.chain(*steps)), list(itertools.chain(*launches))
    shapes = SHAPES[cell.model]()
    phases = {name: [ms for rank in every for ms in rank["phases_ms"][name]] for name in every[0]["phases_ms"]}
    return {
        "what": "exchange",
        "model": cell.model,
        "parameters": numel(shapes),
        "tensors": len(shapes),
        "workers": cell.workers,
        "rate": cell.rate,
        "method": method,
        "steps": len(ordered),
        "ms": {f"p{percent}": round(float(np.percentile(ordered, percent)), 3) for percent in (10, 50, 90)},
        "launch_medians_ms": [round(statistics.median(each), 3) for each in steps],
        "backward_ms": round(statistics.median(ms for rank in every for ms in rank["backward_ms"]), 3),
        "processor_ms": round(statistics.mean(ms for rank in every for ms in rank["processor_ms"]), 3),
        "phases_ms": {name: round(statistics.median(values), 3) for name, values in phases.items()},
        "bytes": round(statistics.mean(rank["bytes"] for rank in every)),
        "checked": every[0]["checked"],
    }
