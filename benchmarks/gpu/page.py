"""Tables and a plot of what `scripts/gpu_check` found, and what they say of the bars."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.kernels.speed import growth_table
from benchmarks.report import IMAGES, RESULTS, ROOT, label, markdown, panels, read_results, save_figure, write_into_page

SLOWER_AT_MOST, DECODE_AT_MOST = 1.5, 0.3
OVER_TOPK, OVER_PUBLISHED = 10, 20
MOST_LAUNCHES = 10
_WITH_VERDICTS = {
    "checks": "checks",
    "horovod": "the adapter on Horovod's ranks beside the CPU",
    "sanitizer": "compute-sanitizer's tools",
}
TOPK, PUBLISHED, GAUSSIAN = "per-tensor top-k", "published DGC", "published GaussianK"


def tables(found: dict[str, Any]) -> str:
    """All that there is to say of `found`."""
    parts = []
    if "models" in found:
        parts += [model_table(found["models"]), decode_table(found["models"])]
    if "growth" in found:
        parts.append(growth_table(found["growth"], "flow", "ps", 1e3))
    if "training" in found:
        figures = [[name, f"{100 * value:.2f} %"] for name, value in found["training"].items()]
        parts.append(markdown(["two processes, one device", "accuracy"], figures))
    return "\n\n".join(parts)


def model_table(rows: list[dict[str, Any]]) -> str:
    """Compress, beside the floor and the published flows."""
    head = ["", "elements", "buckets", "floor, ms", "compress, ms", "times the floor", "launches a bucket",
            "device busy, ms", f"{TOPK}, ms", f"{PUBLISHED}, ms", f"{GAUSSIAN}, ms"]  # fmt: skip
    lines = [
        [
            row["model"], f"{row['numel']:,}", row["buckets"], f"{row['floor_ms']:.3f}", f"{row['compress']['ms']:.3f}",
            f"{row['compress']['ms'] / row['floor_ms']:.2f}×",
            "" if row["launches"] is None else f"{row['launches']:.1f}",
            "" if row["busy_ms"] is None else f"{row['busy_ms']:.3f}",
            *(f"{row[flow]['ms']:.2f} ({row[flow]['ms'] / row['compress']['ms']:.1f}×)"
              for flow in (TOPK, PUBLISHED, GAUSSIAN)),
        ]
        for row in rows
    ]  # fmt: skip
    return markdown(head, lines)


def decode_table(rows: list[dict[str, Any]]) -> str:
    """Decode of eight packets."""
    lines = [
        [row["model"], f"{row['decode']['ms']:.3f}", f"{row['decode']['ms'] / row['compress']['ms']:.2f}×"]
        for row in rows
    ]
    return markdown(["decode of 8 packets", "ms", "times compress"], lines)


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Picoseconds an element over the size, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return
    figure, ((axes,),) = panels(width=6.4, height=4.2)
    for flow in dict.fromkeys(row["flow"] for row in rows):
        mine = [row for row in rows if row["flow"] == flow]
        style = {"linewidth": 2.5} if flow == "ours" else {"linestyle": "--", "alpha": 0.8}
        axes.loglog([r["millions"] for r in mine], [1e3 * r["ms"] / r["millions"] for r in mine], marker="o",
                    label=flow, **style)  # fmt: skip
    label(axes, x="million elements", y="picoseconds an element")
    axes.legend(frameon=False)
    save_figure(figure, file)


def verdicts(found: dict[str, Any]) -> list[str]:
    """Whether each bar is met, in a line."""
    lines = []
    for row in found.get("models", []):
        ours = row["compress"]["ms"]
        lines += [
            _line(f"{row['model']}: compress, times the floor", ours / row["floor_ms"], most=SLOWER_AT_MOST),
            _line(f"{row['model']}: decode, times compress", row["decode"]["ms"] / ours, most=DECODE_AT_MOST),
            _line(f"{row['model']}: faster than {TOPK}", row[TOPK]["ms"] / ours, least=OVER_TOPK),
            _line(f"{row['model']}: faster than {PUBLISHED}", row[PUBLISHED]["ms"] / ours, least=OVER_PUBLISHED),
        ]
        if row["launches"] is not None:
            lines.append(_line(f"{row['model']}: launches a bucket", row["launches"], most=MOST_LAUNCHES))
    if accuracy := found.get("training"):
        lines.append(_line("accuracy of dgc less dense's, points", 100 * (accuracy["dgc"] - accuracy["dense"]), -1))
    return lines


def _line(what: str, value: float, least: float | None = None, most: float | None = None) -> str:
    met = (least is None or value >= least) and (most is None or value <= most)
    bar = f"at least {least:g}" if least is not None else f"at most {most:g}"
    return f"{'met   ' if met else 'MISSED'} {what}: {value:.2f} ({bar})"


def _count(what: str, verdicts: dict[str, str]) -> str:
    well = sum(text in ("", "ok") for text in verdicts.values())
    return f"{what}: {well} of {len(verdicts)} passed"


def main() -> None:
    """Keep what a folder holds: ``python -m benchmarks.gpu.page FOLDER``."""
    folder = Path(sys.argv[1])
    kept = read_results(folder / "gpu.json")
    machine, figures = kept["environment"], kept["figures"]
    if "interpreter" in machine["device"]:
        sys.exit("these are of Triton's interpreter, on no GPU: nothing here is a speed")
    shutil.copy(folder / "gpu.json", RESULTS)
    parts = [
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}; "
        + "; ".join(_count(what, figures.get(name, {})) for name, what in _WITH_VERDICTS.items()),
        tables(figures),
        "\n".join(f"- {line}" for line in verdicts(figures)),
    ]
    if (folder / "gpu-growth.svg").exists():
        shutil.copy(folder / "gpu-growth.svg", IMAGES)
        parts.insert(2, "![picoseconds an element over the number of elements](images/gpu-growth.svg)")
    write_into_page(ROOT / "docs" / "cuda.md", "gpu", "\n\n".join(parts))


if __name__ == "__main__":
    main()
