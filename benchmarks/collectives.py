"""Time of Horovod's collectives over Gloo on emulated hosts, beside the planner's formulas. Needs root on Linux."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.command import Benchmark
from benchmarks.netlab import lab, network
from benchmarks.ranks import launch
from benchmarks.report import RESULTS, complete, deciles, markdown, read_results, slowest
from dgc_horovod.exchange.contract import Round
from dgc_horovod.planning import cluster as formulas
from dgc_horovod.planning.cluster import Cluster, Link, Machine

FILE, TIMEOUT_SECONDS = RESULTS / "collectives.json", 900
RATE, DELAY = "100mbit", "20ms"  # what a hop and Horovod's negotiation cost; bytes are in benchmarks.exchange
SIZES = (8_000, 160_000)  # bytes: multiples of 8 hosts and of 4 bytes
KINDS = ("allgather", "allreduce", "alltoall")
HOSTS, UNTIMED, FEWEST, MOST, SECONDS = (2, 4, 8), 3, 3, 40, 3.0  # seconds of a row


def rank(_: None) -> list[dict[str, Any]]:
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
        count = MOST
        while len(found) < UNTIMED + count:
            hvd.barrier()
            start = time.perf_counter()
            calls[kind](buffer, f"{kind}.{nbytes}")
            found.append(time.perf_counter() - start)
            if len(found) == UNTIMED:
                longest = max(hvd.allgather_object(found[-1], name="longest"))
                count = max(FEWEST, min(count, int(SECONDS / longest)))
        return [round(1e3 * seconds, 3) for seconds in found[UNTIMED:]]

    connections.start()
    return [{"kind": kind, "nbytes": n, "ms": times(kind, n)} for kind, n in itertools.product(KINDS, SIZES)]


def cell(hosts: int) -> list[dict[str, Any]]:
    """A row for each collective and size, and what the link carried."""
    with lab(hosts, RATE, delay=DELAY) as up:
        place = {"hosts": hosts, "rate": RATE, "delay": DELAY, "link_mbit": round(up.one_way(), 1)}
        found = launch("benchmarks.collectives:rank", None, hosts, up, TIMEOUT_SECONDS)
    rows = []
    for of_ranks in zip(*found, strict=True):
        steps = slowest(each["ms"] for each in of_ranks)
        rows.append({**place, **of_ranks[0], "steps": len(steps), "ms": deciles(steps)})
    return rows


def measure(options: argparse.Namespace) -> None:
    """Every number of hosts that is not kept yet."""
    complete(options.file, {f"N={hosts}, {RATE}, {DELAY}": partial(cell, hosts) for hosts in HOSTS})


def predicted(row: Mapping[str, Any]) -> float:
    """Milliseconds of a row by the planner."""
    dtype, width = ("float32", 4) if row["kind"] == "allreduce" else ("uint8", 1)
    link = Link(network.bits_per_second(row["rate"]))
    link = replace(link, latency=link.latency + network.seconds(row["delay"]))
    cluster = Cluster(row["hosts"], link)
    collective = Round("measured", row["kind"], dtype, row["nbytes"] // width)
    adding = Machine(1.0).over_gloo().add(collective)
    return 1e3 * (formulas.waiting(1, cluster) + formulas.seconds(collective, cluster, adding))


def table(kept: Mapping[str, Any]) -> str:
    """A line for each collective and size, measured and predicted for each number of hosts."""
    cells = sorted(kept.values(), key=lambda cell: cell["rows"][0]["hosts"])  # all of the same collectives and sizes
    lines = []
    for rows in zip(*(cell["rows"] for cell in cells), strict=True):
        title = f"{rows[0]['rate']}, {rows[0]['delay']}: {rows[0]['kind']} of {rows[0]['nbytes'] / 1e3:,.0f} kB"
        lines.append([title, *(f"{ms:.1f}" for row in rows for ms in (row["ms"]["p50"], predicted(row)))])
    hosts = [cell["rows"][0]["hosts"] for cell in cells]
    return markdown(["", *(text for n in hosts for text in (f"N = {n}: ms", "predicted"))], lines)


COMMAND = Benchmark("collectives", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE)

if __name__ == "__main__":
    COMMAND.main()
