"""Time of one step's exchange by every method, on emulated hosts behind shaped links. Needs root on Linux.

What is timed: hooks, compression, collectives and decoding, from gradients that are there to p.grad that is filled.

Hosts of several ranks (--ranks) exchange by other methods; their results belong in another file:

  python -m benchmarks.exchange --models resnet50 --workers 2 4 --ranks 2 --rates 1gbit --file nodes.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.exchange import tables
from benchmarks.exchange.methods import METHODS, NODE_METHODS, NOTHING
from benchmarks.netlab import unavailable
from benchmarks.ranks import HERE, hosts_at, launch
from benchmarks.report import complete, deciles, read_results, slowest
from benchmarks.shapes import SHAPES, numel

TIMEOUT_SECONDS = 3_000
RATES = ("100mbit", "1gbit", "10gbit", "none")


@dataclass(frozen=True)
class Cell:
    """One launch of all methods.

    Args:
        model: whose shapes.
        workers: N, the hosts.
        rate: of the hosts' links, nominal.
        density: of what compresses.
        ranks: on each host.
    """

    model: str
    workers: int
    rate: str
    density: float
    ranks: int = 1

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        nodes = f", {self.ranks} ranks a host" if self.ranks > 1 else ""
        return f"{self.model}, N={self.workers}, {self.rate}, density {self.density:g}{nodes}"


def measure(options: argparse.Namespace) -> None:
    """Every cell that is asked for and not in the file; to be quick few methods, without root on one machine."""
    if options.quick:
        methods = options.methods or [NOTHING, "dense", "dgc", "published DGC"]
        rates = [HERE if unavailable() else "1gbit"]
        vars(options).update(models=["resnet50"], workers=[2], rates=rates, launches=1, methods=methods)
    methods = options.methods or list(METHODS if options.ranks == 1 else NODE_METHODS)
    places = itertools.product(options.rates, options.workers, options.models)
    cells = [Cell(model, n, rate, options.density, options.ranks) for rate, n, model in places]
    complete(options.file, {cell.key: partial(figures, cell, methods, options) for cell in cells})


def figures(cell: Cell, methods: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Launch the ranks of a cell, and again, so that no moment of a noisy machine decides; their steps together."""
    with hosts_at(cell.workers, cell.rate, cell.ranks) as hosts:
        link = [hosts.one_way(), *hosts.measure([(1, 2), (2, 1)])] if hosts and cell.workers > 1 else []
        seconds, warm_up, fewest, most = (0.3, 3, 1, 4) if options.quick else (5.0, 10, 3, 40)
        order = {
            **asdict(cell), "methods": methods,
            "seconds": seconds, "warm_up": warm_up, "fewest": fewest, "most": most,
            "master": hosts.addresses[0] if hosts else "127.0.0.1", "device": "eth0" if hosts else "lo",
        }  # fmt: skip
        ranks, function = cell.workers * cell.ranks, "benchmarks.exchange.worker:rank"
        found = [launch(function, order, ranks, hosts, TIMEOUT_SECONDS) for _ in range(options.launches)]
    rows = [_row(cell, name, [[rank[name] for rank in one] for one in found]) for name in methods]
    return {"link_mbit": [round(rate) for rate in link], "density": cell.density, "rows": rows}


def _row(cell: Cell, method: str, launches: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The figures of a method."""
    steps = [slowest(rank["ms"] for rank in one) for one in launches]
    every = list(itertools.chain(*launches))
    ordered = sorted(itertools.chain(*steps))
    phases = {name: [ms for rank in every for ms in rank["phases_ms"][name]] for name in every[0]["phases_ms"]}
    place = {"model": cell.model, "workers": cell.workers, "ranks": cell.ranks, "rate": cell.rate, "method": method}
    return {
        **place,
        "parameters": numel(SHAPES[cell.model]()),
        "steps": len(ordered),
        "ms": deciles(ordered),
        "launch_medians_ms": [round(statistics.median(each), 3) for each in steps],
        "processor_ms": round(statistics.mean(ms for rank in every for ms in rank["processor_ms"]), 3),
        "phases_ms": {name: round(statistics.median(values), 3) for name, values in phases.items()},
        "bytes": round(statistics.mean(rank["bytes"] for rank in every)),
        "state_bytes": max(rank["state_bytes"] for rank in every),
        "checked": every[0]["checked"],
    }


COMMAND = Benchmark(
    "exchange", __doc__ or "", measure, lambda options: tables.every_cell(read_results(options.file)), tables.FILE,
    (
        argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="M", help="whose shapes"),
        argument("--workers", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="hosts"),
        argument("--ranks", type=int, default=1, metavar="G", help="on each host"),
        argument("--rates", nargs="+", choices=RATES, default=RATES, metavar="R", help="of the links"),
        argument(
            "--methods", nargs="+", choices=list({**METHODS, **NODE_METHODS}), metavar="W",
            help=f"of {'; '.join(METHODS)}; on hosts of several ranks of {'; '.join(NODE_METHODS)}; None: all",
        ),
        argument("--density", type=float, default=0.001, metavar="D", help="of what compresses"),
        argument("--launches", type=int, default=2, metavar="L", help="of each cell, their steps together"),
    ),
    quick=True,
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
