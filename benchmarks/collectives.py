"""Time of Horovod's collectives over Gloo on emulated hosts, beside the planner's formulas. Needs root on Linux."""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.command import Benchmark, argument
from benchmarks.netlab import lab
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, check_machine, markdown, read_results, remembered, slowest
from dgc_horovod.exchange.contract import Round
from dgc_horovod.planning import collectives as formulas
from dgc_horovod.planning.cluster import Cluster, Link, Machine

FILE, TIMEOUT_SECONDS = RESULTS / "collectives.json", 900
LINKS = (("100mbit", "20ms"),)  # what a hop and Horovod's negotiation cost; bytes are in benchmarks.exchange
SIZES = (8_000, 160_000)  # bytes: multiples of 8 hosts and of 4 bytes
BITS = {"100mbit": 1e8, "1gbit": 1e9}
KINDS = ("allgather", "allreduce", "alltoall")
UNTIMED, FEWEST = 3, 3


def rank(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every collective in turn, of every size: milliseconds of each on this rank; all ranks begin together."""
    import horovod.torch as hvd
    import torch

    from benchmarks import connections

    def alltoall(buffer: torch.Tensor, name: str) -> object:
        parts = torch.full((hvd.size(),), buffer.numel() // hvd.size(), dtype=torch.int32)
        return hvd.alltoall(buffer, splits=parts, name=name)

    calls: dict[str, Callable[[torch.Tensor, str], object]] = {
        "allgather": lambda buffer, name: hvd.allgather(buffer, name=name),
        "allreduce": lambda buffer, name: hvd.allreduce(buffer, name=name, op=hvd.Sum),
        "alltoall": alltoall,
    }

    def times(kind: str, nbytes: int) -> list[float]:
        dtype = torch.float32 if kind == "allreduce" else torch.uint8
        buffer, found = torch.zeros(nbytes // dtype.itemsize, dtype=dtype), list[float]()
        count = order["most"]
        while len(found) < UNTIMED + count:
            hvd.barrier()
            start = time.perf_counter()
            calls[kind](buffer, f"{kind}.{nbytes}")
            found.append(time.perf_counter() - start)
            if len(found) == UNTIMED:
                longest = max(hvd.allgather_object(found[-1], name="longest"))
                count = max(FEWEST, min(count, int(order["seconds"] / longest)))
        return [round(1e3 * seconds, 3) for seconds in found[UNTIMED:]]

    connections.start()
    return [{"kind": kind, "nbytes": n, "ms": times(kind, n)} for kind, n in itertools.product(KINDS, SIZES)]


def cell(hosts: int, rate: str, delay: str, seconds: float, most: int) -> dict[str, Any]:
    """A row for each collective and size, and what the link carried."""
    with lab(hosts, rate, delay=delay) as up:
        place = {"hosts": hosts, "rate": rate, "delay": delay, "link_mbit": round(up.one_way(), 1)}
        order = {"seconds": seconds, "most": most}
        found = launch("benchmarks.collectives:rank", order, hosts, up, TIMEOUT_SECONDS)
    rows = []
    for of_ranks in zip(*found, strict=True):
        steps = slowest(each["ms"] for each in of_ranks)
        shown = {f"p{p}": round(float(np.percentile(steps, p)), 3) for p in (10, 50, 90)}
        rows.append({**place, **of_ranks[0], "steps": len(steps), "ms": shown})
    return {"rows": rows}


def measure(options: argparse.Namespace) -> None:
    """Every number of hosts that is not kept yet."""
    check_machine(options.file, (each["environment"] for each in read_results(options.file).values()))
    for hosts, link in itertools.product(options.hosts, LINKS):
        make = functools.partial(cell, hosts, *link, options.seconds, options.most)
        remembered(options.file, f"N={hosts}, {', '.join(link)}", make)


def predicted(row: Mapping[str, Any]) -> float:
    """Milliseconds of a row by the planner."""
    dtype, width = ("float32", 4) if row["kind"] == "allreduce" else ("uint8", 1)
    delay = float(row["delay"].removesuffix("ms")) / 1e3
    link = Link(BITS[row["rate"]])
    cluster = Cluster(row["hosts"], Link(link.bits, link.latency + delay, link.message))
    collective = Round("measured", row["kind"], dtype, row["nbytes"] // width)
    adding = Machine(1.0).over_gloo().add(collective)
    return 1e3 * (formulas.waiting(1, cluster) + formulas.seconds(collective, cluster, adding))


def table(kept: Mapping[str, Any]) -> str:
    """A line for each collective and size, measured and predicted for each number of hosts."""
    rows = [row for each in kept.values() for row in each["rows"]]
    hosts = sorted({row["hosts"] for row in rows})
    lines = []
    for place in dict.fromkeys((row["rate"], row["delay"], row["kind"], row["nbytes"]) for row in rows):
        line = [f"{place[0]}, {place[1]}: {place[2]} of {place[3] / 1e3:,.0f} kB"]
        for count in hosts:
            found = [r for r in rows if (r["rate"], r["delay"], r["kind"], r["nbytes"], r["hosts"]) == (*place, count)]
            line += [f"{found[0]['ms']['p50']:.1f}", f"{predicted(found[0]):.1f}"] if found else ["", ""]
        lines.append(line)
    return markdown(["", *(text for n in hosts for text in (f"N = {n}: ms", "predicted"))], lines)


COMMAND = Benchmark(
    "collectives", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE,
    (
        argument("--hosts", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="numbers of hosts"),
        argument("--seconds", type=float, default=3.0, metavar="S", help="of each row"),
        argument("--most", type=int, default=40, metavar="T", help="times of a row"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
