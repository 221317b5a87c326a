"""The exchange of today's package beside that of an earlier commit, in turns, each by its own benchmark.

python -m benchmarks.exchange.against 7b00759^ --models resnet50 --workers 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.exchange.methods import MEMORY
from benchmarks.exchange.tables import in_launches, milliseconds
from benchmarks.ranks import output_of
from benchmarks.report import RESULTS, ROOT, keep, markdown, read_results
from benchmarks.shapes import SHAPES

FILE, TIMEOUT_SECONDS = RESULTS / "against.json", 1_800  # that a cell, or the build of a commit, may take
PUBLISHED = "published DGC"
METHODS = (MEMORY, "dgc", PUBLISHED)


def check_out(commit: str, folder: Path) -> Path:
    """The package of `commit`, built."""
    folder.mkdir()
    packed = folder.with_suffix(".tar")
    _run(["git", "archive", "-o", str(packed), commit], ROOT)
    shutil.unpack_archive(packed, folder, filter="data")
    _run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder)
    return folder


def _run(command: Sequence[str], tree: Path) -> None:
    output_of(command, TIMEOUT_SECONDS, {"PYTHONPATH": str(tree)}, tree)


def rows_of(tree: Path, model: str, workers: int, rate: str, file: Path) -> list[dict[str, Any]]:
    """The rows of one launch of the package in `tree`."""
    file.unlink(missing_ok=True)
    words = ["--models", model, "--workers", str(workers), "--rates", rate, "--launches", "1", "--file", str(file)]
    _run([sys.executable, "-m", "benchmarks.exchange", *words, "--methods", *METHODS], tree)
    (cell,) = json.loads(file.read_text()).values()
    return cell["rows"]  # type: ignore[no-any-return]


def in_turns(trees: Mapping[str, Path], options: argparse.Namespace, model: str, workers: int) -> list[dict[str, Any]]:
    """A row for each of `trees` and each method: medians over the rounds, and every round's own."""
    from tqdm import tqdm

    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in tqdm(range(options.rounds), desc=f"{model}, N = {workers}", unit="round"):
            for name in sorted(trees, reverse=turn % 2 == 1):  # so that neither is always the first
                for row in rows_of(trees[name], model, workers, options.rate, Path(folder, "one.json")):
                    found.setdefault((name, row["method"]), []).append(row)
    return [_middle(*place, rows) for place, rows in sorted(found.items())]


def _middle(package: str, method: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the medians of several rounds'."""
    rounds, names = [row["ms"]["p50"] for row in rows], rows[0]["phases_ms"]
    phases = {name: statistics.median(row["phases_ms"][name] for row in rows) for name in names}
    processor = statistics.median(row["processor_ms"] for row in rows)
    times = {"ms": statistics.median(rounds), "processor_ms": processor, "phases_ms": phases, "rounds_ms": rounds}
    return {"package": package, "method": method, **times}


def measure(options: argparse.Namespace) -> None:
    """Build the commit, and measure every cell anew."""
    with tempfile.TemporaryDirectory() as top:
        trees = {"before": check_out(options.commit, Path(top, "before")), "now": ROOT}
        for model, workers in itertools.product(options.models, options.workers):
            rows = in_turns(trees, options, model, workers)
            keep(options.file, f"{model}, N = {workers}, {options.rate}", {"commit": options.commit, "rows": rows})


def table(kept: Mapping[str, Any]) -> str:
    """Earlier and now, side by side, and now beside the methods that the package has no part in."""

    def times(slower: Mapping[str, Any], faster: Mapping[str, Any]) -> str:
        return in_launches(slower["rounds_ms"], faster["rounds_ms"])

    lines = []
    for key, cell in kept.items():
        rows = {(row["package"], row["method"]): row for row in cell["rows"]}
        before, now = rows["before", "dgc"], rows["now", "dgc"]
        memory, published = rows["now", MEMORY], rows["now", PUBLISHED]
        pairs = [(row["ms"], row["processor_ms"], row["phases_ms"]["compress"]) for row in (before, now)]
        parts = [f"{milliseconds(a)} → {milliseconds(b)}" for a, b in zip(*pairs, strict=True)]
        parts[0] += f", {times(before, now)}"
        lines.append([key, *parts, milliseconds(memory["ms"]), times(now, memory), times(published, now)])
    columns = ["step", "processor time of a rank", "compress", MEMORY, f"dgc / {MEMORY}", f"{PUBLISHED} / dgc"]
    return markdown(["dgc, before → now, ms", *columns], lines)


COMMAND = Benchmark(
    "exchange.against", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE,
    (
        argument("commit", help="git's name of the earlier one"),
        argument("--models", nargs="+", choices=SHAPES, default=["resnet50"], metavar="M", help="whose shapes"),
        argument("--workers", nargs="+", type=int, default=[2, 4], metavar="N", help="hosts"),
        argument("--rate", default="1gbit", metavar="R", help="of the links"),
        argument("--rounds", type=int, default=5, metavar="K", help="launches of each of the two"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
