"""Time of Horovod's collectives over Gloo on emulated hosts, beside the planner's formulas. Needs root on Linux."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ranks
from benchmarks.collectives import tables
from benchmarks.netlab import NetlabError, lab
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import check_machine, read_results, remembered

LINKS = (("100mbit", "20ms"),)  # what a hop and Horovod's negotiation cost; bytes are in benchmarks.exchange
SIZES = (8_000, 160_000)  # bytes: multiples of 8 hosts and of 4 bytes
_SECONDS = 900


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    made.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="default: 2 4 8")
    made.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of each row (default: %(default)s)")
    made.add_argument("--most", type=int, default=40, metavar="T", help="of times each (default: %(default)s)")
    made.add_argument("--file", type=Path, default=tables.FILE, help="of results (default: benchmarks/results/...)")
    return made


def measure(hosts: int, rate: str, delay: str, seconds: float, most: int) -> dict[str, Any]:
    """A row for each collective and size, and what the link carried."""
    with tempfile.TemporaryDirectory() as folder, lab(hosts, rate, delay=delay) as up:
        file = Path(folder, "found.json")
        order = {"sizes": SIZES, "seconds": seconds, "most": most}
        link = round(up.one_way(), 1)
        ranks.launch("benchmarks.collectives.worker", [str(file), json.dumps(order)], hosts, up, _SECONDS)
        found = json.loads(file.read_text())
    rows = [
        {
            **row,
            "steps": len(row["ms"]),
            "ms": {f"p{p}": round(float(np.percentile(row["ms"], p)), 3) for p in (10, 50, 90)},
        }
        for row in found
    ]
    place = {"hosts": hosts, "rate": rate, "delay": delay, "link_mbit": link}
    return {"rows": [{**place, **row} for row in rows]}


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    if options.file.exists():
        check_machine(options.file, (each["environment"] for each in read_results(options.file).values()))
    try:
        for hosts, (rate, delay) in itertools.product(options.hosts, LINKS):
            make = functools.partial(measure, hosts, rate, delay, options.seconds, options.most)
            remembered(options.file, f"N={hosts}, {rate}, {delay}", make)
    except (NetlabError, LaunchError) as error:
        raise SystemExit(f"benchmarks.collectives: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(tables.collectives())


if __name__ == "__main__":
    main()
