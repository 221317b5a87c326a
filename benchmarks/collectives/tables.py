"""Collectives as they were measured, beside the planner's formulas."""

from __future__ import annotations

from typing import Any

from benchmarks.report import RESULTS, markdown, read_results
from dgc_horovod.exchange.contract import Round
from dgc_horovod.planning import collectives as formulas
from dgc_horovod.planning.cluster import Cluster, Link, Machine

FILE = RESULTS / "collectives.json"
BITS = {"100mbit": 1e8, "1gbit": 1e9}


def predicted(row: dict[str, Any]) -> float:
    """Milliseconds of a row by the planner."""
    dtype, width = ("float32", 4) if row["kind"] == "allreduce" else ("uint8", 1)
    delay = float(row["delay"].removesuffix("ms")) / 1e3
    link = Link(BITS[row["rate"]])
    cluster = Cluster(row["hosts"], Link(link.bits, link.latency + delay, link.message))
    collective = Round("measured", row["kind"], dtype, row["nbytes"] // width)
    return 1e3 * (
        formulas.waiting(1, cluster) + formulas.seconds(collective, cluster, Machine(1.0).over_gloo().add(collective))
    )


def collectives() -> str:
    """A line for each collective and size, measured and predicted for each number of hosts."""
    rows = [row for cell in read_results(FILE).values() for row in cell["rows"]]
    hosts = sorted({row["hosts"] for row in rows})
    lines = []
    for place in dict.fromkeys((row["rate"], row["delay"], row["kind"], row["nbytes"]) for row in rows):
        line = [f"{place[0]}, {place[1]}: {place[2]} of {place[3] / 1e3:,.0f} kB"]
        for count in hosts:
            found = [r for r in rows if (r["rate"], r["delay"], r["kind"], r["nbytes"], r["hosts"]) == (*place, count)]
            line += [f"{found[0]['ms']['p50']:.1f}", f"{predicted(found[0]):.1f}"] if found else ["", ""]
        lines.append(line)
    head = [text for count in hosts for text in (f"N = {count}: ms", "planned")]
    return markdown(["", *head], lines)
