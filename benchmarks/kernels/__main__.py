"""Times the kernels and measures the packets, on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.kernels import speed, wire
from benchmarks.report import RESULTS, check_machine, complete, read_results
from benchmarks.shapes import SHAPES

FILE = RESULTS / "kernels.json"
Rows = list[dict[str, Any]]
# name -> by key in the file of results the functions that measure, and one that makes the table
STUDIES: dict[str, tuple[dict[str, Callable[[], Rows]], Callable[[Sequence[Mapping[str, Any]]], str]]] = {
    "compress": ({f"compress, {m}": partial(speed.compress, m) for m in SHAPES}, speed.compress_table),
    "stages": ({"stages": speed.stages}, speed.stages_table),
    "adam": ({"adam": speed.adam}, speed.adam_table),
    "decode": ({"decode": speed.decode}, speed.decode_table),
    "wire": ({"wire": wire.wire}, wire.wire_table),
}


def measure(options: argparse.Namespace) -> None:
    """Every study that is asked for and not in the file; a study is of one machine."""
    for name in _asked(options):
        cells, kept = STUDIES[name][0], read_results(options.file)
        check_machine(options.file, [kept[key]["environment"] for key in cells if key in kept])
        complete(options.file, cells, one_machine=False)


def _asked(options: argparse.Namespace) -> list[str]:
    return list(STUDIES) if "all" in options.studies else options.studies


def figures(kept: Mapping[str, Any], name: str) -> Rows:
    """The rows of a study."""
    return [row for key in STUDIES[name][0] if key in kept for row in kept[key]["rows"]]


def table(name: str, kept: Mapping[str, Any]) -> str:
    """Of a study."""
    return STUDIES[name][1](figures(kept, name))


def tables(options: argparse.Namespace) -> str:
    """Of every study that was asked for and is kept."""
    kept = read_results(options.file)
    return "\n\n".join(table(name, kept) for name in _asked(options) if figures(kept, name))


COMMAND = Benchmark(
    "kernels", __doc__ or "", measure, tables, FILE,
    (argument("studies", nargs="*", choices=[*STUDIES, "all"], default="all", help="which studies"),),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
