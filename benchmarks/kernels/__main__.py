"""Times the kernels and measures the packets, on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.kernels import speed, stages, wire
from benchmarks.report import RESULTS, check_machine, keep, read_results
from benchmarks.shapes import SHAPES

FILE = RESULTS / "kernels.json"
Rows = list[dict[str, Any]]
# name -> function of whether only a small part is measured, and one that makes the table
STUDIES: dict[str, tuple[Callable[[bool], Rows], Callable[[Sequence[Mapping[str, Any]]], str]]] = {
    "compress": (lambda quick: [], speed.compress_table),
    "stages": (stages.stages, stages.stages_table),
    "adam": (stages.adam, stages.adam_table),
    "growth": (speed.growth, speed.growth_table),
    "decode": (speed.decode, speed.decode_table),
    "wire": (wire.wire, wire.wire_table),
}


def measure(options: argparse.Namespace) -> None:
    """Every study that is asked for; of compress every model is a cell of its own, and all are of one machine."""
    for name in _asked(options):
        start = time.monotonic()
        if name == "compress":
            models = options.models[:1] if options.quick else options.models
            others = [f"compress, {model}" for model in SHAPES if model not in models]
            kept = read_results(options.file)
            check_machine(options.file, [kept[key]["environment"] for key in others if key in kept])
            for model in models:
                keep(options.file, f"compress, {model}", {"figures": speed.compress(model)})
        else:
            keep(options.file, name, {"figures": STUDIES[name][0](options.quick)})
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def _asked(options: argparse.Namespace) -> list[str]:
    return list(STUDIES) if "all" in options.studies else options.studies


def figures(kept: Mapping[str, Any], name: str) -> Rows:
    """The rows of a study."""
    keys = [f"compress, {model}" for model in SHAPES] if name == "compress" else [name]
    return [row for key in keys if key in kept for row in kept[key]["figures"]]


def table(name: str, kept: Mapping[str, Any]) -> str:
    """Of a study."""
    return STUDIES[name][1](figures(kept, name))


def tables(options: argparse.Namespace) -> str:
    """Of every study that was asked for and is kept."""
    kept = read_results(options.file)
    return "\n\n".join(table(name, kept) for name in _asked(options) if figures(kept, name))


def quick(options: argparse.Namespace) -> None:
    """A small part of each: see `measure`."""


COMMAND = Benchmark(
    "kernels", __doc__ or "", measure, tables, FILE,
    (
        argument("studies", nargs="*", choices=[*STUDIES, "all"], default="all", help="which studies"),
        argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="M", help="of compress"),
    ),
    quick,
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
