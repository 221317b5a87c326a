"""Steps as the planner predicts them beside those that were measured between two hosts.

What a prediction knows: the model's shapes, density, N, the nominal rate of the link; and constants of the machine from
one other cell, ResNet-50 between two hosts whose link is not shaped, which is therefore not counted itself:

* of each kind of allreduce (Horovod's and torch's, fp32 and fp16), the seconds to add a byte;
* of PowerSGD, the seconds of an element;
* of dgc's kinds, the seconds of a step beside compressing, decoding and the network.

For dgc, compressing and decoding are either the cell's own phases ("own phases": what a planner who measures on the
machine knows), or those of that other cell, by elements ("phases of the other cell").
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.exchange.tables import FILE, NAMES, Row, milliseconds
from benchmarks.planning.scaling import BITS, specs
from benchmarks.report import markdown, read_results, where
from dgc_horovod import DGCConfig
from dgc_horovod.config import FLAT
from dgc_horovod.planning.cluster import PAYLOAD, Cluster, Link, Machine
from dgc_horovod.planning.cost_model import DENSE, FP16, POWER_SGD, Cost, cost

# The planner's method, and how many ranks PowerSGD has; published DGC is none of them
METHODS = {
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


class Prediction(NamedTuple):
    """A row of the exchange study, milliseconds as predicted, and those predicted without its phases."""

    row: Row
    ms: float
    without: float

    @property
    def error(self) -> float:
        """Relative, of `ms`."""
        return self.ms / self.measured - 1

    @property
    def error_without(self) -> float:
        """Relative, of `without`."""
        return self.without / self.measured - 1

    @property
    def measured(self) -> float:
        """Median milliseconds."""
        return float(self.row["ms"]["p50"])


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
    return cost(METHODS[row["method"]], specs(row["model"]), config, cluster, machine, _RANK)


def _network_ms(row: Row, machine: Machine = _ALONE) -> float:
    return 1e3 * _cost(row, machine).network_seconds


def calibrated(known: Row) -> Machine:
    """The constants of a method, so that the known row is predicted as it was measured."""
    method, n, ms = METHODS[known["method"]], known["parameters"], known["ms"]["p50"]
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


def predict(rows: Sequence[Row], workers: int) -> list[Prediction]:
    """Every row of the planner's methods among so many hosts but those that the constants are of."""
    known = {row["method"]: row for row in rows if _place(row) == KNOWN}
    found = []
    for row in where(rows, workers=workers):
        if row["method"] in METHODS and _place(row) != KNOWN:
            machine, phases = calibrated(known[row["method"]]), row["phases_ms"]
            priced = _cost(row, machine)
            own = without = 1e3 * (priced.network_seconds + priced.cpu_seconds)
            if phases:
                own = _network_ms(row) + 1e3 * machine.overhead + phases["compress"] + phases["decode"]
            found.append(Prediction(row, own, without))
    return found


def summary(found: Sequence[Prediction]) -> str:
    """How far off, by method and all together."""
    lines = []
    for method in (*METHODS, ""):
        mine = [each for each in found if method in ("", each.row["method"])]
        texts = [method or "**all**", str(len(mine))]
        for errors in ([abs(each.error) for each in mine], [abs(each.error_without) for each in mine]):
            texts += [f"{statistics.median(errors):.0%}", f"{max(errors):.0%}"]
        lines.append(texts)
    head = ["", "cells", "median error", "largest", "phases of the other cell: median error", "largest"]
    return markdown(head, lines)


def cells(found: Sequence[Prediction]) -> str:
    """Each cell: measured, predicted, error."""
    lines = []
    for each in found:
        place = f"{each.row['model']}, {NAMES[each.row['rate']]}, {each.row['method']}"
        errors = f"{each.error:+.0%}", f"{each.error_without:+.0%}"
        lines.append([place, milliseconds(each.measured), milliseconds(each.ms), *errors])
    return markdown(["N = 2", "measured, ms", "predicted, ms", "error", "error with the other cell's phases"], lines)


def many(rows: Sequence[Row]) -> str:
    """Four and eight hosts, whose ranks share two cores: what the network takes, and what is beside it."""
    lines = []
    for each in (*predict(rows, 4), *predict(rows, 8)):
        row, wait = each.row, each.row["phases_ms"].get("wait")
        times = map(milliseconds, (each.measured, _network_ms(row), wait, each.without))
        lines.append([f"{row['model']}, N = {row['workers']}, {row['method']}", *times])
    head = ["1 Gbps", "measured, ms", "network, predicted", "wait, measured", "predicted with a core a rank"]
    return markdown(head, lines)
