"""What every benchmark does with its figures: machine and versions beside them, a table, a place in the docs."""

from __future__ import annotations

import importlib.metadata
import io
import json
import lzma
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, str]:
    """Versions and machine, for the JSON."""
    installed = {str(each.metadata["Name"]).lower(): each.version for each in importlib.metadata.distributions()}
    named = ("dgc-horovod", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "numpy")
    versions = {name: installed[name] for name in named if name in installed}
    return {
        **versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": str(os.cpu_count()),
    }


def processor() -> str:
    """The processor's own name, where Linux knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor()


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def save(name: str, figures: Any) -> None:
    """Write `figures` with the environment to ``benchmarks/results/<name>.json``."""
    text = json.dumps({"environment": environment(), "figures": figures}, indent=1)
    write_results(RESULTS / f"{name}.json", text + "\n")


def save_figure(figure: Any, file: Path) -> None:
    """Write a plot of matplotlib, small enough for a page; the same figures make the same file.

    SVG: text stays text (where DejaVu is not installed, the reader's own sans-serif takes its place), and coordinates
    have two decimals of a point. PNG, for what has thousands of points: a palette of 32 colours.

    Args:
        figure: it is closed.
        file: ends in ``.svg`` or ``.png``.
    """
    import matplotlib.pyplot as plt
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    written = io.BytesIO()
    if file.suffix == ".png":
        figure.savefig(written, format="png", dpi=120)
        picture = Image.open(written).convert("RGB")
        picture.quantize(32, dither=Image.Dither.NONE).save(file, optimize=True)
    else:
        fonts = ["DejaVu Sans", "Verdana", "Arial"]
        with plt.rc_context({"svg.hashsalt": file.name, "svg.fonttype": "none", "font.sans-serif": fonts}):
            figure.savefig(written, format="svg", metadata={"Date": None})
        file.write_text(re.sub(r"(\.\d\d)\d+", r"\1", written.getvalue().decode()))
    plt.close(figure)


class OtherMachine(RuntimeError):
    """A file of results was measured elsewhere: figures of two machines do not go into one table."""


def check_machine(file: Path, environments: Iterable[dict[str, str]]) -> None:
    """Raise OtherMachine unless everything in `file` was measured on this machine, with these versions."""
    here = environment()
    if any(found != here for found in environments):
        raise OtherMachine(
            f"{file} is of another machine or of other versions; to measure here: --file ANOTHER, or remove it"
        )


def read_results(file: Path) -> Any:
    """What a file of results holds: JSON, compressed where the name ends in ``.xz``."""
    packed = file.read_bytes()
    return json.loads(lzma.decompress(packed) if file.suffix == ".xz" else packed)


def write_results(file: Path, text: str) -> None:
    """Write a file of results in one go, since a study may be stopped at any moment.

    Args:
        file: to replace. Where its name ends in ``.xz`` the text is compressed; the same text gives the same bytes.
        text: the JSON.
    """
    file.parent.mkdir(exist_ok=True)
    fresh = file.with_suffix(".new")
    packed = text.encode()
    fresh.write_bytes(lzma.compress(packed, preset=lzma.PRESET_EXTREME | 6) if file.suffix == ".xz" else packed)
    fresh.replace(file)


def remembered(file: Path, key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `file` keeps under `key`; made, and kept, where it is not there: a study that was stopped goes on."""
    kept = read_results(file) if file.exists() else {}
    if key not in kept:
        kept[key] = {**make(), "environment": environment()}
        write_results(file, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    return kept[key]


def write_into_page(page: Path, marker: str, text: str) -> None:
    """Replace what stands between ``<!-- marker: begin -->`` and ``<!-- marker: end -->`` of a page."""
    begin, end = f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    made, count = pattern.subn(lambda _: f"{begin}\n{text}\n{end}", page.read_text())
    if count != 1:
        raise ValueError(f"{page.name} has {count} places for {marker!r}, not 1")
    page.write_text(made)
