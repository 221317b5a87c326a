"""Scaling efficiency from measured exchanges, and a model of it for more hosts than one machine can play.

Efficiency is ``throughput(N) / (N * throughput(1))``. For a job that computes for T a step and hides nothing of the
exchange E(N) behind it, that is ``T / (T + E(N))``.

For N beyond those measured it is what two hosts took, and what the planner (`dgc_horovod.planning`) says of N more than
of two. At N = 2 there is a core for each rank.

For clusters of nodes of eight workers, up to 1,024, it is the planner's answer: bytes of a card, and efficiency of
ResNet-50. Of the machine: compression is what two hosts took beside the link, for all elements on one CPU thread;
decoding is from `benchmarks.kernels decode`. The rest is the planner's own (docs/planning.md): 20 us of latency, 10
GB/s between the workers of a node.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.exchange.tables import NAMES, STYLES, TITLES, Row
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels.speed import nanoseconds_an_element
from benchmarks.report import label, markdown, panels, read_results, save_figure, where
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.planning.cluster import Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, FP16, cost

COMPUTE_MS = 200.0
MODELLED = (16, 32, 64)
MODEL, NODE_SIZE, WORKERS = "resnet50", 8, (16, 32, 64, 128, 256, 512, 1024)
RATES = {"1 Gbps": 1e9, "10 Gbps": 1e10}
DENSITIES, MEASURED_DENSITY = (0.001, 0.01), 0.001
BUDGET = 2 * 10**6
WITHIN = f"nodes, {BUDGET // 10**6} MB a step"
METHODS = {FLAT: FLAT, "nodes": HIERARCHICAL, "nodes, sharded": f"{HIERARCHICAL}+{SHARDED}", WITHIN: HIERARCHICAL}
BITS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}


def efficiency(exchange_ms: float, compute_ms: float = COMPUTE_MS) -> float:
    """Of a job whose step computes for `compute_ms` and then exchanges for `exchange_ms`."""
    return compute_ms / (compute_ms + exchange_ms)


def measured(rows: Sequence[Row], method: str) -> dict[int, float]:
    """N -> median milliseconds of the exchange.

    Args:
        rows: of one model and one rate.
        method: its name in the rows.
    """
    return {row["workers"]: row["ms"]["p50"] for row in sorted(where(rows, method=method), key=_workers)}


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
    rows = read_results(kernels.FILE)["decode"]["figures"]
    largest = max(map(_workers, rows))
    return max(nanoseconds_an_element(rows, row) or 0.0 for row in rows if row["workers"] == largest)


class Point(NamedTuple):
    """One method at one size: bytes that a card receives at a step, and efficiency."""

    nbytes: int
    efficiency: float


def point(method: str, workers: int, density: float, rate: float, rows: Sequence[Row]) -> Point:
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
    found = cost(name, specs(MODEL), config, Cluster(workers, Link(rate), NODE_SIZE), _machine(rows))
    return Point(found.card_bytes, efficiency(1e3 * (found.network_seconds + found.cpu_seconds)))


def _machine(rows: Sequence[Row]) -> Machine:
    """Its compression is what dgc's exchange between two hosts took beside the network."""
    machine = Machine(COMPUTE_MS / 1e3, overlap=0.0, compress=0.0, update=0.0, overhead=0.0)
    machine = replace(machine, decode=decode_nanoseconds() / 1e9)
    tensors = specs(MODEL)
    beside = cost(FLAT, tensors, DGCConfig(density=MEASURED_DENSITY), Cluster(2, Link(1e9)), machine)
    rest = measured(rows, "dgc")[2] / 1e3 - beside.network_seconds - beside.cpu_seconds
    return replace(machine, compress=rest / sum(spec.numel for spec in tensors))


def cluster_table(rows: Sequence[Row], density: float) -> str:
    """Megabytes into a card, and efficiency, by method and number of workers."""
    methods, lines = (DENSE, FP16, *METHODS), []
    for method in methods:
        points = [point(method, workers, density, 1e9, rows) for workers in WORKERS]
        lines.append([f"{method}: MB received by a card", *(_megabytes(each.nbytes) for each in points)])
    for (name, rate), method in itertools.product(RATES.items(), methods):
        points = [point(method, workers, density, rate, rows) for workers in WORKERS]
        lines.append([f"{method}: efficiency, {name}", *(f"{each.efficiency:.0%}" for each in points)])
    return markdown([f"density {density:.1%}, workers:", *(f"{n:,}" for n in WORKERS)], lines)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.{max(0, 2 - int(math.log10(max(nbytes, 1e6) / 1e6)))}f}"


def draw_clusters(rows: Sequence[Row], file: Path) -> None:
    """Efficiency over the number of workers, a panel a rate and density."""
    figure, grid = panels(2, 2, 4.2, 3.0, sharex=True, sharey=True)
    for line, density in zip(grid, DENSITIES, strict=True):
        for axes, (name, rate) in zip(line, RATES.items(), strict=True):
            for method in (DENSE, FP16, *METHODS):
                found = [100 * point(method, workers, density, rate, rows).efficiency for workers in WORKERS]
                style = "--" if method in (DENSE, FP16) else "-"
                axes.semilogx(WORKERS, found, style, marker="o", markersize=4, base=2, label=method)
            axes.set_xticks(WORKERS, [f"{n:,}" for n in WORKERS], fontsize=8)
            axes.minorticks_off()
            axes.set_ylim(0, 100)
            label(axes, f"density {density:.1%}, {name}")
    for axes in grid[-1]:
        axes.set_xlabel("workers, eight a node")
    for axes in grid[:, 0]:
        axes.set_ylabel("modelled efficiency, %")
    lines = grid[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    save_figure(figure, file)


def draw_efficiency(rows: Sequence[Row], model: str, rates: Sequence[str], density: float, file: Path) -> None:
    """Scaling efficiency over N, a panel a rate: measured (points) and modelled (dashed)."""
    figure, (line,) = panels(len(rates), sharey=True)
    for axes, rate in zip(line, rates, strict=True):
        mine = where(rows, model=model, rate=rate)
        for method in ("dense", "fp16", "published DGC", "dgc"):
            style = {**STYLES[method], "markersize": 5}
            found = {n: 100 * efficiency(ms) for n, ms in measured(mine, method).items()}
            if not found:
                continue
            axes.semilogx(*zip(*found.items(), strict=True), label=method, **style)
            if method in ("dense", "dgc"):
                guess = {2: found[2]} if 2 in found else {}
                guess |= {n: 100 * efficiency(ms) for n, ms in modelled(mine, method, density).items()}
                dashed = {**style, "linestyle": "--", "markerfacecolor": "white", "linewidth": 1.2}
                axes.semilogx(list(guess), list(guess.values()), label=f"{method}, modelled", **dashed)
        axes.set_xticks((2, 4, 8, *MODELLED), map(str, (2, 4, 8, *MODELLED)))
        axes.minorticks_off()
        axes.set_ylim(0, 100)
        label(axes, f"{TITLES[model]}, {NAMES[rate]}", x="hosts, N")
    line[0].set_ylabel("scaling efficiency, %")
    line[0].legend(frameon=False, fontsize=8)
    save_figure(figure, file)
