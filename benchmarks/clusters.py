"""The planner's answer for clusters of nodes of eight workers, up to 1,024: bytes of a card, and scaling efficiency.

ResNet-50, computing for `scaling.COMPUTE_MS` a step; nothing hides. Of the machine: compression is what two hosts took
beside the link, for all elements on one CPU thread; decoding is from `benchmarks.kernels decode`. The rest is the
planner's own (docs/planning.md): 20 us of latency, 10 GB/s between the workers of a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import scaling
from benchmarks.report import markdown, save_figure
from dgc_horovod import DGCConfig
from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, FP16, cost

MODEL, NODE_SIZE, WORKERS = "resnet50", 8, (16, 32, 64, 128, 256, 512, 1024)
RATES = {"1 Gbps": 1e9, "10 Gbps": 1e10}
DENSITIES, MEASURED_DENSITY = (0.001, 0.01), 0.001
BUDGET = 2 * 10**6
WITHIN = f"nodes, {BUDGET // 10**6} MB a step"
METHODS = {FLAT: FLAT, "nodes": HIERARCHICAL, "nodes, sharded": f"{HIERARCHICAL}+{SHARDED}", WITHIN: HIERARCHICAL}


@dataclass(frozen=True)
class Point:
    """One method at one size: bytes that a card receives at a step, milliseconds beside computing, density."""

    nbytes: int
    ms: float
    density: float = 1.0

    @property
    def efficiency(self) -> float:
        """Of a job whose step computes for `scaling.COMPUTE_MS`."""
        return scaling.efficiency(self.ms)


def point(method: str, workers: int, density: float, rate: float, rows: Sequence[dict[str, Any]]) -> Point:
    """The model's answer.

    Args:
        method: `DENSE`, `FP16` or a name in `METHODS`.
        workers: N, a multiple of `NODE_SIZE`.
        density: fraction of the elements that a worker, or slice of a node, sends.
        rate: bits a second of a card.
        rows: exchange of the model at 1 Gbps, as measured.
    """
    name = METHODS.get(method, method)
    budget = BUDGET if method == WITHIN else None
    config = DGCConfig(density=density, max_bytes_per_step=budget)
    specs = scaling.specs(MODEL)
    found = cost(name, specs, config, Cluster(workers, Link(rate), NODE_SIZE), _machine(rows))
    return Point(found.card_bytes, 1e3 * (found.network_seconds + found.cpu_seconds), found.density)


def _machine(rows: Sequence[dict[str, Any]]) -> Machine:
    """Its compression is what dgc's exchange between two hosts took beside the network."""
    machine = Machine(scaling.COMPUTE_MS / 1e3, overlap=0.0, compress=0.0, update=0.0, overhead=0.0)
    machine = replace(machine, decode=scaling.decode_nanoseconds() / 1e9)
    specs = scaling.specs(MODEL)
    beside = cost(FLAT, specs, DGCConfig(density=MEASURED_DENSITY), Cluster(2, Link(1e9)), machine)
    rest = scaling.measured(rows, "dgc")[2] / 1e3 - beside.network_seconds - beside.cpu_seconds
    return replace(machine, compress=rest / sum(spec.numel for spec in specs))


def table(rows: Sequence[dict[str, Any]], density: float) -> str:
    """Megabytes into a card, and efficiency, by method and number of workers."""
    lines = []
    for method in (DENSE, FP16, *METHODS):
        points = [point(method, workers, density, 1e9, rows) for workers in WORKERS]
        lines.append([f"{method}: MB into a card", *(_megabytes(each.nbytes) for each in points)])
    for name, rate in RATES.items():
        for method in (DENSE, FP16, *METHODS):
            points = [point(method, workers, density, rate, rows) for workers in WORKERS]
            lines.append([f"{method}: efficiency, {name}", *(f"{each.efficiency:.0%}" for each in points)])
    return markdown([f"density {density:.1%}, workers:", *(f"{n:,}" for n in WORKERS)], lines)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.{max(0, 2 - int(math.log10(max(nbytes, 1e6) / 1e6)))}f}"


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Efficiency over the number of workers, a panel a rate and density."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(8.4, 6.0), layout="constrained", sharex=True, sharey=True)
    for line, density in zip(panels, DENSITIES, strict=True):
        for axes, (name, rate) in zip(line, RATES.items(), strict=True):
            for method in (DENSE, FP16, *METHODS):
                found = [100 * point(method, workers, density, rate, rows).efficiency for workers in WORKERS]
                style = "--" if method in (DENSE, FP16) else "-"
                axes.semilogx(WORKERS, found, style, marker="o", markersize=4, base=2, label=method)
            axes.set_title(f"density {density:.1%}, {name}", fontsize=10)
            axes.set_xticks(WORKERS, [f"{n:,}" for n in WORKERS], fontsize=8)
            axes.minorticks_off()
            axes.set_ylim(0, 100)
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("workers, eight a node")
    for axes in panels[:, 0]:
        axes.set_ylabel("modelled efficiency, %")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False, fontsize=8
    )
    save_figure(figure, file)
