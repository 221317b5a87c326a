"""The exchange as it is beside that of an earlier commit, in turns within one hour; the benchmark is today's for both.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange import cells
from benchmarks.exchange.registry import MEMORY
from benchmarks.exchange.tables import milliseconds
from benchmarks.ranks import LaunchError, exit_on_signals, output_of
from benchmarks.report import RESULTS, ROOT, environment, markdown, write_results
from benchmarks.shapes import SHAPES

FILE = RESULTS / "against.json"
PUBLISHED = "published DGC"
METHODS = (MEMORY, "dgc", PUBLISHED)
_SECONDS = 1_800  # that a cell, or the build of a commit, may take


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.exchange.against", description=__doc__)
    add = made.add_argument
    add("commit", help="git's name of the earlier one")
    add("--models", nargs="+", choices=SHAPES, default=["resnet50"], metavar="M", help=f"of {', '.join(SHAPES)}")
    add("--workers", nargs="+", type=int, default=[2, 4], metavar="N", help="hosts (default: 2 4)")
    add("--rate", default="1gbit", metavar="R", help="of the links (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="K", help="launches of each of the two (default: %(default)s)")
    add("--file", type=Path, default=FILE, help=f"of results (default: benchmarks/results/{FILE.name})")
    return made


def check_out(commit: str, folder: Path) -> Path:
    """The package of `commit`, built, with the benchmarks of today."""
    folder.mkdir()
    packed = folder.with_suffix(".tar")
    _run(["git", "archive", "-o", str(packed), commit], ROOT)
    shutil.unpack_archive(packed, folder, filter="data")
    shutil.rmtree(folder / "benchmarks", ignore_errors=True)
    shutil.copytree(ROOT / "benchmarks", folder / "benchmarks")
    _run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], folder)
    return folder


def _run(command: Sequence[str], tree: Path) -> None:
    output_of(command, _SECONDS, {"PYTHONPATH": str(tree)}, tree)


def measure(tree: Path, model: str, workers: int, rate: str, file: Path) -> list[dict[str, Any]]:
    """The rows of one launch of the package in `tree`."""
    file.unlink(missing_ok=True)
    words = ["--models", model, "--workers", str(workers), "--rates", rate, "--launches", "1", "--file", str(file)]
    _run([sys.executable, "-m", "benchmarks.exchange", *words, "--methods", *METHODS], tree)
    (cell,) = json.loads(file.read_text()).values()
    return cell["rows"]  # type: ignore[no-any-return]


def in_turns(trees: dict[str, Path], options: argparse.Namespace, model: str, workers: int) -> list[dict[str, Any]]:
    """A row for each of `trees` and each method: medians over the rounds, and every round's own."""
    from tqdm import tqdm

    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in tqdm(range(options.rounds), desc=f"{model}, N = {workers}", unit="round"):
            for name in sorted(trees, reverse=turn % 2 == 1):  # so that neither is always the first
                for row in measure(trees[name], model, workers, options.rate, Path(folder, "one.json")):
                    found.setdefault((name, row["method"]), []).append(row)
    return [
        {
            "package": name,
            "method": method,
            "ms": statistics.median(row["ms"]["p50"] for row in rows),
            "processor_ms": statistics.median(row["processor_ms"] for row in rows),
            "phases_ms": {
                phase: statistics.median(row["phases_ms"][phase] for row in rows) for phase in rows[0]["phases_ms"]
            },
            "rounds_ms": [row["ms"]["p50"] for row in rows],
        }
        for (name, method), rows in sorted(found.items())
    ]


def table(kept: dict[str, Any]) -> str:
    """Earlier and now, side by side, and now beside what the package has no part in.

    Ratios are medians over the rounds, each of that round's own launches.
    """
    lines = []
    for key, cell in kept.items():
        before, now = (_of(cell, name, "dgc") for name in ("before", "now"))
        memory, published = (_of(cell, "now", method) for method in (MEMORY, PUBLISHED))
        times = [(row["ms"], row["processor_ms"], row["phases_ms"]["compress"]) for row in (before, now)]
        parts = [f"{milliseconds(a)} → {milliseconds(b)}" for a, b in zip(*times, strict=True)]
        parts[0] += f", {_times(before, now)}"
        beside = milliseconds(memory["ms"]), _times(now, memory), _times(published, now)
        lines.append([key, *parts, *beside])
    columns = ["step", "processor time of a rank", "compress", MEMORY, "a step of that", f"faster than {PUBLISHED}"]
    return markdown(["dgc, before → now, ms", *columns], lines)


def _times(slower: dict[str, Any], faster: dict[str, Any]) -> str:
    """The median of the rounds' ratios, and their range."""
    ratios = [a / b for a, b in zip(slower["rounds_ms"], faster["rounds_ms"], strict=True)]
    return f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"


def _of(cell: dict[str, Any], package: str, method: str) -> dict[str, Any]:
    (row,) = (row for row in cell["rows"] if (row["package"], row["method"]) == (package, method))
    return row  # type: ignore[no-any-return]


def main() -> None:
    """Do what the command line says."""
    options = parser().parse_args()
    exit_on_signals()
    kept = cells.read(options.file)
    with tempfile.TemporaryDirectory() as top:
        try:
            trees = {"before": check_out(options.commit, Path(top, "before")), "now": ROOT}
            for model, workers in itertools.product(options.models, options.workers):
                rows = in_turns(trees, options, model, workers)
                key = f"{model}, N = {workers}, {options.rate}"
                kept[key] = {"environment": environment(), "commit": options.commit, "rows": rows}
                write_results(options.file, json.dumps(kept, indent=1) + "\n")
        except LaunchError as error:
            raise SystemExit(f"benchmarks.exchange.against: {error}") from None
    print(table(kept))


if __name__ == "__main__":
    main()
