"""A model of clusters of nodes of eight workers, up to 1,024: bytes of a card, and scaling efficiency.

ResNet-50's n elements, k of them sent by a worker, M nodes of G, T of computing a step, a card of B bits a second::

    exchange    8 * bytes / (r*B) + cycle * rounds + hop * (participants - 1) of each round and bucket
    + compress  c, nodes c / G: what two hosts took beside the link, for all n elements on one CPU thread
    + decode    d * elements received; an owner adds k more
    + inside    4n * (G-1)/G bytes among the workers of a node
    efficiency  T / (T + all of it): nothing hides

r is what dense reached of the link between two hosts, c their exchange less its bytes, d from `benchmarks.kernels
decode`. Assumed, not measured: a hop of 50 us, and 10 GB/s between the workers of a node (PCIe; NVLink is faster).
Bytes are what packets weigh (`core.budget.card_bytes`); a ring in host order crosses each card once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import scaling
from benchmarks.report import markdown, save_figure
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.budget import card_bytes, within_budget
from dgc_horovod.core.workspace import message_spec
from dgc_horovod.exchange.contract import ALLREDUCE, INSIDE
from dgc_horovod.exchange.topology import Topology
from dgc_horovod.stats import ring_received

MODEL, NODE_SIZE, WORKERS = "resnet50", 8, (16, 32, 64, 128, 256, 512, 1024)
RATES = {"1 Gbps": 1e9, "10 Gbps": 1e10}
DENSITIES = (0.001, 0.01)
BUDGET = 2 * 10**6
_HOP, _CYCLE, _INSIDE = 50e-6, 1e-3, 10e9  # seconds, seconds, bytes a second
DENSE, FP16, WITHIN = "dense", "fp16", f"nodes, {BUDGET // 10**6} MB a step"
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


@functools.cache
def specs() -> tuple[TensorSpec, ...]:
    """The model's tensors."""
    return tuple(TensorSpec(name, tuple(shape)) for name, shape in SHAPES[MODEL]())


def point(method: str, workers: int, density: float, rate: float, rows: Sequence[dict[str, Any]]) -> Point:
    """The model's answer.

    Args:
        method: `DENSE`, `FP16` or a name in `METHODS`.
        workers: N, a multiple of `NODE_SIZE`.
        density: fraction of the elements that a worker, or slice of a node, sends.
        rate: bits a second of a card.
        rows: exchange of the model at 1 Gbps, as measured.
    """
    reached, base = _reached(rows)
    numel = sum(spec.numel for spec in specs())
    if method in (DENSE, FP16):
        nbytes = ring_received((4 if method == DENSE else 2) * numel, workers)
        return Point(nbytes, 1e3 * (8 * nbytes / (reached * rate) + _CYCLE + 2 * _HOP * (workers - 1)))
    topology = Topology(0, workers, 1 if method == FLAT else NODE_SIZE)
    budget = BUDGET if method == WITHIN else None
    config = within_budget(
        specs(), DGCConfig(density=density, exchange=METHODS[method], max_bytes_per_step=budget), topology
    )
    nbytes = card_bytes(specs(), config, topology)
    seconds = 8 * nbytes / (reached * rate) + base / topology.node_size
    rounds = [
        message_spec(b, config, config.density, topology).rounds for b in plan(specs(), config, topology.nodes).buckets
    ]
    seconds += _CYCLE * max(map(len, rounds))
    for collective in (each for of_bucket in rounds for each in of_bucket if each.group != INSIDE):
        turns = 2 if collective.kind == ALLREDUCE else 1
        seconds += turns * _HOP * (topology.nodes - 1)
    sent = config.density * numel
    received = 2 * sent if config.shards else topology.nodes * sent
    seconds += received * scaling.decode_nanoseconds() / 1e9
    seconds += 4 * numel * (topology.node_size - 1) / topology.node_size / _INSIDE
    return Point(nbytes, 1e3 * seconds, config.density)


def _reached(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """What dense reached of a link of 1 Gbit/s between two hosts, and seconds of dgc's exchange beside its bytes."""
    dense, dgc = (scaling.measured(rows, name)[2] / 1e3 for name in ("dense", "dgc"))
    numel = sum(spec.numel for spec in specs())
    reached = 8 * ring_received(4 * numel, 2) / 1e9 / dense
    config = DGCConfig(density=0.001)
    return reached, dgc - 8 * card_bytes(specs(), config, Topology(0, 2)) / (reached * 1e9)


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
