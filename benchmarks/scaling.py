"""What the planner says of steps that were measured, and of more hosts than one machine can play.

Efficiency is ``throughput(N) / (N * throughput(1))``. For a job that computes for T a step and hides nothing of the
exchange E(N) behind it, that is ``T / (T + E(N))``.

For clusters of nodes of eight workers, up to 1,024, it is the answer of the planner (`dgc_horovod.planning`): bytes of
a card, and efficiency of ResNet-50. Of the machine: compression is what two hosts took beside the link, for all
elements on one CPU thread; decoding is from `benchmarks.kernels decode`. The rest is the planner's own
(docs/planning.md): 20 us of latency, 10 GB/s between the workers of a node.

What a prediction of a measured step knows: the model's shapes, density, N, the nominal rate of the link; and constants
of the machine from one other cell, ResNet-50 between two hosts whose link is not shaped, which is therefore not counted
itself:

* of each kind of allreduce (Horovod's and torch's, fp32 and fp16), the seconds to add a byte;
* of PowerSGD, the seconds of an element;
* of dgc's kinds, the seconds of a step beside compressing, decoding and the network.

For dgc, compressing and decoding are either the cell's own phases ("own phases": what a planner who measures on the
machine knows), or those of that other cell, by elements ("phases of the other cell").
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.exchange.tables import FILE, Row
from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels.speed import nanoseconds_an_element
from benchmarks.report import markdown, read_results, where
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.config import FLAT, HIERARCHICAL, SHARDED
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.planning.cluster import PAYLOAD, Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, FP16, POWER_SGD, Cost, cost

COMPUTE_MS = 200.0
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


@functools.cache
def specs(model: str) -> tuple[TensorSpec, ...]:
    """A model's tensors."""
    return tuple(TensorSpec(name, tuple(shape)) for name, shape in SHAPES[model]())


def decode_nanoseconds() -> float:
    """For each element received from each rank; the most of those measured at the largest N."""
    rows = read_results(kernels.FILE)["decode"]["rows"]
    largest = max(row["workers"] for row in rows)
    return max(nanoseconds_an_element(rows, row) or 0.0 for row in where(rows, workers=largest))


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
    (row,) = where(rows, method="dgc", workers=2)
    rest = row["ms"]["p50"] / 1e3 - beside.network_seconds - beside.cpu_seconds
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


# The planner's method, and how many ranks PowerSGD has; published DGC is none of them
PLANNED = {
    "dense": DENSE,
    "fp16": FP16,
    "torch DDP": DENSE,
    "torch DDP, fp16 hook": FP16,
    "torch DDP, PowerSGD 2": POWER_SGD,
    "dgc": FLAT,
    "dgc, 4-bit values": FLAT,
    "dgc, sampled": FLAT,
    "dgc, gaussian": FLAT,
}
KNOWN = ("resnet50", 2, "none")
_RANK = 2
_ALONE = Machine(1e-9, overlap=0.0, compress=0.0, encode=0.0, decode=0.0, update=0.0, overhead=0.0, factorise=0.0)


@functools.cache
def _unshaped() -> float:
    """Bits a second: the link of the known cell, measured one way, as its nominal rate would be."""
    (link,) = (each["link_mbit"] for each in read_results(FILE).values() if _place(each["rows"][0]) == KNOWN)
    return float(1e6 * link[0] / PAYLOAD)


def _place(row: Row) -> tuple[str, int, str]:
    return row["model"], row["workers"], row["rate"]


def _cost(row: Row, machine: Machine) -> Cost:
    config = DGCConfig(values="4bit" if "4-bit" in row["method"] else "bf16")
    cluster = Cluster(row["workers"], Link(BITS.get(row["rate"]) or _unshaped()))
    return cost(PLANNED[row["method"]], specs(row["model"]), config, cluster, machine, _RANK)


def _network_ms(row: Row, machine: Machine = _ALONE) -> float:
    return 1e3 * _cost(row, machine).network_seconds


def calibrated(known: Row) -> Machine:
    """The constants of a method, so that the known row is predicted as it was measured."""
    method, n, ms = PLANNED[known["method"]], known["parameters"], known["ms"]["p50"]
    if method in (DENSE, FP16):
        # reduce-scatter waits for the adding; the allgather half is the wire's
        width = 4 if method == DENSE else 2
        add = 1e-3 * (ms - _network_ms(known) / 2) / (width * n / known["workers"])
        return replace(_ALONE, add_fp32=add, add_fp16=add)
    own = 1e-3 * (ms - _network_ms(known))
    if method == POWER_SGD:
        return replace(_ALONE, factorise=own / (n * _RANK))
    phases = {name: value / 1e3 for name, value in known["phases_ms"].items()}
    overhead = own - phases["compress"] - phases["decode"]
    return replace(_ALONE, compress=phases["compress"] / n, update=phases["decode"] / n, overhead=overhead)


def predict(rows: Sequence[Row], workers: int) -> list[tuple[str, float, float]]:
    """Of every row of the planner's methods among so many hosts but the known cell's: method, and relative errors.

    First with the cell's own phases, then with those of the known one.
    """
    known = {row["method"]: row for row in rows if _place(row) == KNOWN}
    found = []
    for row in where(rows, workers=workers):
        if row["method"] in PLANNED and _place(row) != KNOWN:
            machine, phases, ms = calibrated(known[row["method"]]), row["phases_ms"], row["ms"]["p50"]
            priced = _cost(row, machine)
            own = without = 1e3 * (priced.network_seconds + priced.cpu_seconds)
            if phases:
                own = _network_ms(row) + 1e3 * machine.overhead + phases["compress"] + phases["decode"]
            found.append((row["method"], own / ms - 1, without / ms - 1))
    return found


def summary(found: Sequence[tuple[str, float, float]]) -> str:
    """How far off, by method and all together."""
    lines = []
    for method in (*PLANNED, ""):
        mine = [errors for name, *errors in found if method in ("", name)]
        columns = [[abs(error) for error in errors] for errors in zip(*mine, strict=True)]
        figures = [f"{figure:.0%}" for errors in columns for figure in (statistics.median(errors), max(errors))]
        lines.append([method or "**all**", len(mine), *figures])
    head = ["", "cells", "median error", "largest", "phases of the other cell: median error", "largest"]
    return markdown(head, lines)
