"""Time of one step's exchange by every method, on emulated hosts behind shaped links. Needs root on Linux.

What is timed: hooks, compression, collectives and decoding, from gradients that are there to p.grad that is filled.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange import cells, gradients, tables
from benchmarks.exchange.cells import HERE, Cell
from benchmarks.exchange.methods import METHODS, NOTHING
from benchmarks.exchange.worker import Order
from benchmarks.netlab import Lab, NetlabError, lab, unavailable
from benchmarks.ranks import LaunchError
from benchmarks.report import RESULTS
from benchmarks.shapes import SHAPES

FILE = RESULTS / "exchange.json"
QUICK = {
    "models": ["resnet50"],
    "workers": [2],
    "rates": ["1gbit"],
    "methods": [NOTHING, "dense", "dgc", "published DGC"],
}
RATES = ("100mbit", "1gbit", "10gbit", "none")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    add = made.add_argument
    add("--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="M", help=f"of {', '.join(SHAPES)}")
    add("--workers", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="hosts (default: 2 4 8)")
    add("--rates", nargs="+", default=RATES, metavar="R", help=f"of the links (default: {' '.join(RATES)})")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="W", help=f"of {'; '.join(METHODS)}")
    add("--density", type=float, default=0.001, metavar="D", help="of what compresses (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S", help="of timed steps a method (default: %(default)s)")
    add(
        "--launches", type=int, default=2, metavar="L", help="of each cell, their steps together (default: %(default)s)"
    )
    add("--again", action="store_true", help="measure anew what is in the results already; without it, that is shown")
    add("--quick", action="store_true", help="a smoke test of a minute; keeps nothing, and does without root")
    return made


@contextlib.contextmanager
def _hosts(workers: int, rate: str) -> Iterator[Lab | None]:
    if rate == HERE:
        yield None
    else:
        with lab(workers, rate) as up:
            yield up


def study(options: argparse.Namespace, file: Path) -> None:
    """Measure every cell that is asked for and not in `file`; the large arrays of a model are made once."""
    from tqdm import tqdm

    places = itertools.product(options.rates, options.workers, options.models)
    asked = [Cell(model, n, rate, options.density) for rate, n, model in places]
    left = [cell for cell in asked if options.again or not _has(cells.read(file), cell, options.methods)]
    if len(left) < len(asked):
        print(f"{len(asked) - len(left)} of {len(asked)} cells are in {file.name} already and are not measured again")
    with tempfile.TemporaryDirectory() as top, tqdm(total=len(left), unit="cell") as bar:
        for rate, workers in dict.fromkeys((cell.rate, cell.workers) for cell in left):
            with _hosts(workers, rate) as hosts:
                for cell in (cell for cell in left if (cell.rate, cell.workers) == (rate, workers)):
                    bar.set_postfix_str(cell.key)
                    order = _order(cell, options, _folder(Path(top), cell.model), hosts)
                    cells.keep(file, cell, cells.measure(cell, order, hosts, options.launches))
                    bar.update()


def _has(kept: dict[str, Any], cell: Cell, methods: Sequence[str]) -> bool:
    """Whether every method of a cell has been measured."""
    return cell.key in kept and {*methods} <= {row["method"] for row in kept[cell.key]["rows"]}


def _folder(top: Path, model: str) -> Path:
    folder = top / model
    if not folder.exists():
        folder.mkdir()
        gradients.write(folder, [math.prod(shape) for _, shape in SHAPES[model]()])
    return folder


def _order(cell: Cell, options: argparse.Namespace, folder: Path, hosts: Lab | None) -> Order:
    master = hosts.addresses[0] if hosts else "127.0.0.1"
    most = (3, 4) if options.quick else (10, 40)
    return Order(
        cell.model, tuple(options.methods), options.density, options.seconds, *most, str(folder), master
    )  # fmt: skip


def _print(file: Path, models: Sequence[str], workers: Sequence[int], rates: Sequence[str], density: float) -> None:
    rows = [row for cell in cells.read(file).values() if cell["density"] == density for row in cell["rows"]]
    for n in workers:
        for model in models:
            found = [row for row in rows if (row["model"], row["workers"]) == (model, n) and row["rate"] in rates]
            if found:
                print(f"\n{tables.times(found)}")


def main() -> None:
    """Do what the command line says."""
    options, start = parser().parse_args(), time.monotonic()
    if options.quick:
        vars(options).update(QUICK, seconds=0.3, launches=1)
        if reason := unavailable():
            print(f"no emulated hosts, so this is ranks on one machine: {reason}")
            options.rates = [HERE]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "quick.json") if options.quick else FILE
        try:
            study(options, file)
        except (NetlabError, LaunchError) as error:
            raise SystemExit(f"benchmarks.exchange: {error}") from None
        _print(file, options.models, options.workers, options.rates, options.density)
    print(f"\nexchange: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
