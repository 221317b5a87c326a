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

from benchmarks.exchange import cells, gradients, tables
from benchmarks.exchange.cells import HERE, Cell
from benchmarks.exchange.registry import METHODS, NOTHING
from benchmarks.exchange.worker import Order
from benchmarks.netlab import Lab, NetlabError, lab, unavailable
from benchmarks.ranks import LaunchError, exit_on_signals
from benchmarks.report import RESULTS, OtherMachine, check_machine
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
    add("--rates", nargs="+", choices=RATES, default=RATES, metavar="R", help=f"of {', '.join(RATES)}")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="W", help=f"of {'; '.join(METHODS)}")
    add("--density", type=float, default=0.001, metavar="D", help="of what compresses (default: %(default)s)")
    add("--seconds", type=float, default=5.0, metavar="S", help="of timed steps a method (default: %(default)s)")
    add(
        "--launches", type=int, default=2, metavar="L", help="of each cell, their steps together (default: %(default)s)"
    )
    add("--again", action="store_true", help="measure anew what this machine has measured already")
    add("--file", type=Path, default=FILE, help=f"of results (default: benchmarks/results/{FILE.name})")
    add("--quick", action="store_true", help="a smoke test of a minute, of few methods; keeps nothing, needs no root")
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
    kept, wanted = cells.read(file), {*options.methods}
    check_machine(file, (each["environment"] for each in kept.values()))
    left = [cell for cell in asked if options.again or not wanted <= cells.methods(kept, cell)]
    for cell in left:
        if lost := cells.methods(kept, cell) - wanted:
            raise LaunchError(
                f"{file} has {len(lost)} more methods of {cell.key}; measure those as well, or --file ANOTHER"
            )
    if len(left) < len(asked):
        print(f"{len(asked) - len(left)} of {len(asked)} cells are in {file.name}; --again measures them anew")
    with tempfile.TemporaryDirectory() as top, tqdm(total=len(left), unit="cell") as bar:
        for rate, workers in dict.fromkeys((cell.rate, cell.workers) for cell in left):
            with _hosts(workers, rate) as hosts:
                for cell in (cell for cell in left if (cell.rate, cell.workers) == (rate, workers)):
                    bar.set_postfix_str(cell.key)
                    order = _order(cell, options, _folder(Path(top), cell.model), hosts)
                    cells.keep(file, cell, cells.measure(cell, order, hosts, options.launches))
                    bar.update()


def _folder(top: Path, model: str) -> Path:
    folder = top / model
    if not folder.exists():
        folder.mkdir()
        gradients.write(folder, [math.prod(shape) for _, shape in SHAPES[model]()])
    return folder


def _order(cell: Cell, options: argparse.Namespace, folder: Path, hosts: Lab | None) -> Order:
    master = hosts.addresses[0] if hosts else "127.0.0.1"
    return Order(
        model=cell.model,
        methods=tuple(options.methods),
        density=options.density,
        seconds=options.seconds,
        warm_up=3 if options.quick else 10,
        fewest=1 if options.quick else 3,
        most=4 if options.quick else 40,
        folder=str(folder),
        master=master,
        device="eth0" if hosts else "lo",
    )


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
    exit_on_signals()
    if options.quick:
        vars(options).update(QUICK, seconds=0.3, launches=1)
        if reason := unavailable():
            print(f"no emulated hosts, so this is ranks on one machine: {reason}")
            options.rates = [HERE]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "quick.json") if options.quick else options.file
        try:
            study(options, file)
        except (NetlabError, LaunchError, OtherMachine) as error:
            raise SystemExit(f"benchmarks.exchange: {error}") from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        _print(file, options.models, options.workers, options.rates, options.density)
    print(f"\nexchange: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
