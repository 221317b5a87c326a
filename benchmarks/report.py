"""Figures of the benchmarks: machine and versions beside them, files of results, tables, plots, places in the docs."""

from __future__ import annotations

import importlib.metadata
import io
import json
import lzma
import math
import multiprocessing
import os
import platform
import re
import statistics
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"


def versions(*names: str) -> dict[str, str]:
    """Of those of these packages that are installed."""
    installed = {str(each.metadata["Name"]).lower(): each.version for each in importlib.metadata.distributions()}
    return {name: installed[name] for name in names if name in installed}


def environment() -> dict[str, str]:
    """Versions and machine, for the JSON."""
    used = versions("dgc-horovod", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")
    machine = {"python": platform.python_version(), "machine": platform.machine(), "processor": processor()}
    return {**used, **machine, "cores": str(os.cpu_count())}


def processor() -> str:
    """The processor's own name, where Linux knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor()


class OtherMachine(RuntimeError):
    """A file of results was measured elsewhere: figures of two machines do not go into one table."""


def check_machine(file: Path, environments: Iterable[Mapping[str, str]]) -> None:
    """Raise OtherMachine unless everything in `file` was measured on this machine, with these versions."""
    here = environment()
    if any(found != here for found in environments):
        raise OtherMachine(
            f"{file} is of another machine or of other versions; to measure here: --file ANOTHER, or remove it"
        )


def read_results(file: Path) -> Any:
    """The contents of a file of results: JSON, compressed where its name ends in ``.xz``; empty where there is none."""
    if not file.exists():
        return {}
    packed = file.read_bytes()
    return json.loads(lzma.decompress(packed) if file.suffix == ".xz" else packed)


def write_results(file: Path, kept: Any) -> None:
    """Write a file of results in one go, since a study may be stopped at any moment.

    Args:
        file: to replace; compressed where its name ends in ``.xz``. The same results give the same bytes.
        kept: all that it holds.
    """
    compressed = file.suffix == ".xz"
    text = json.dumps(kept, indent=None if compressed else 1, allow_nan=False) + "\n"
    file.parent.mkdir(exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(lzma.compress(text.encode(), preset=lzma.PRESET_EXTREME | 6) if compressed else text.encode())
    fresh.replace(file)


Figures = Mapping[str, Any] | list[dict[str, Any]]  # of a cell; a list is kept as its ``rows``


def keep(file: Path, key: str, figures: Figures) -> None:
    """Put the figures of a cell, with the environment, into a file, in the place of those that it had."""
    cell = {"environment": environment(), **(figures if isinstance(figures, Mapping) else {"rows": figures})}
    write_results(file, dict(sorted({**read_results(file), key: cell}.items())))


def complete(
    file: Path,
    cells: Mapping[str, Callable[[], Figures]],
    one_machine: bool = True,
    again: Container[str] = (),
    processes: int = 0,
) -> None:
    """Make every cell that `file` does not have, and keep each at once: a study that was stopped goes on.

    Args:
        file: of results.
        cells: functions that make the figures, by key.
        one_machine: whether all that is in the file must be of this machine; else OtherMachine.
        again: keys of what the file has and is made anew.
        processes: so many cells at a time, each in a process; 0: one after the other, in this one.

    Raises:
        OtherMachine: see `one_machine`.
        BrokenProcessPool: a process was killed.
    """
    from tqdm import tqdm

    kept = read_results(file)
    if one_machine:
        check_machine(file, (each["environment"] for each in kept.values()))
    left = {key: make for key, make in cells.items() if key not in kept or key in again}
    with closing(_made(left, processes)) as made:
        for key, figures in (bar := tqdm(made, total=len(left), unit="cell", ncols=100)):
            bar.set_postfix_str(key)
            keep(file, key, figures)


def _made(cells: Mapping[str, Callable[[], Figures]], processes: int) -> Generator[tuple[str, Figures], None, None]:
    if not processes:
        yield from ((key, make()) for key, make in cells.items())
        return
    with pool(processes) as workers:
        futures = {workers.submit(make): key for key, make in cells.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes with an interpreter of their own; after an exception, an interrupt too, nothing goes on."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as made:
        try:
            yield made
        except BaseException:
            for child in multiprocessing.active_children():  # the pool itself would finish what is in its queue
                child.kill()
            raise


def deciles(values: Sequence[float]) -> dict[str, float]:
    """The median and the two outer deciles, of milliseconds."""
    return {f"p{percent}": round(float(np.percentile(values, percent)), 3) for percent in (10, 50, 90)}


def slowest(ranks: Iterable[Sequence[float]]) -> list[float]:
    """Of each step the time on the slowest rank, which is when the step is over."""
    return [max(times) for times in zip(*ranks, strict=True)]


def where(rows: Iterable[Mapping[str, Any]], **fields: Any) -> list[Any]:
    """The rows that have these fields."""
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def spread(values: Sequence[float], form: str) -> str:
    """Mean ± standard deviation over seeds; or how many diverged, if any."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost or not values:
        return f"{lost} of {len(values)} diverged" if lost else ""
    mean, deviation = mean_and_deviation(values)
    return f"{mean:{form}}" + (f" ± {deviation:{form.lstrip('+')}}" if len(values) > 1 else "")


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The standard deviation of one value is 0."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def write_into_page(page: Path, marker: str, text: str) -> None:
    """Replace what stands between ``<!-- marker: begin -->`` and ``<!-- marker: end -->`` of a page."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    made, count = pattern.subn(lambda _: f"{begin}\n{text}\n{end}", page.read_text())
    if count != 1:
        raise ValueError(f"{page.name} has {count} places for {marker!r}, not 1")
    page.write_text(made)


@contextmanager
def plot(titles: Sequence[str], y: str, file: Path) -> Iterator[Sequence[Any]]:
    """Yield the axes of a plot of matplotlib, a panel a title; then add a legend and write it as an SVG.

    The same figures make the same file, small enough for a page: text stays text (where DejaVu is not installed, the
    reader's own sans-serif takes its place), and coordinates have two decimals of a point.
    """
    import matplotlib.pyplot as plt

    size = ((4.2 + 1.8 / len(titles)) * len(titles), 3.8)
    figure, (line,) = plt.subplots(1, len(titles), figsize=size, layout="constrained", squeeze=False)
    for axes, title in zip(line, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3, which="major")
    yield line
    line[0].set_ylabel(y)
    figure.legend(*line[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    written, fonts = io.BytesIO(), ["DejaVu Sans", "Verdana", "Arial"]
    with plt.rc_context({"svg.hashsalt": file.name, "svg.fonttype": "none", "font.sans-serif": fonts}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    file.write_text(re.sub(r"(\.\d\d)\d+", r"\1", written.getvalue().decode()))
    plt.close(figure)
