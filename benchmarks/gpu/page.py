"""Tables of what `scripts/gpu_check` found, and what they say of the bars."""

from __future__ import annotations

import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import RESULTS, markdown, read_results, spread

LARGE, SLOWER_AT_MOST, SMALL_SLOWER_AT_MOST = 100_000_000, 1.5, 2.0  # elements; of models that have as many, of others
DECODE_AT_MOST, IDLE_AT_MOST = 0.5, 5.0  # times compress; percent of compress
OVER_TOPK, OVER_PUBLISHED = 10, 20
MOST_LAUNCHES = 10
ADDED_AT_MOST = {"SGD": 3.0, "AdamW": 2.0}  # percent of a step
_WITH_VERDICTS = {
    "checks": "checks",
    "horovod": "the adapter on Horovod's ranks beside the CPU",
    "sanitizer": "compute-sanitizer's tools",
}
STEP_WAYS = ("alone", "with_empty_hook", "compressed")
TOPK, PUBLISHED, GAUSSIAN = "per-tensor top-k", "published DGC", "published GaussianK"


def tables(found: dict[str, Any]) -> str:
    """All that there is to say of `found`."""
    parts = []
    if "models" in found:
        parts += [model_table(found["models"]), host_table(found["models"]), decode_table(found["models"])]
    if "steps" in found:
        parts.append(step_table(found["steps"]))
    return "\n\n".join(parts)


def model_table(rows: list[dict[str, Any]]) -> str:
    """Compress, beside the floor and the published flows."""
    lines = []
    for row in rows:
        ours, flows = row["compress"]["ms"], [row[flow]["ms"] for flow in (TOPK, PUBLISHED, GAUSSIAN)]
        figures = f"{row['floor_ms']:.3f}", f"{ours:.3f}", f"{ours / row['floor_ms']:.2f}×"
        device = _figure(row.get("launches"), ".1f"), _figure(row.get("busy_ms"), ".3f")
        peers = (f"{ms:.2f} ({ms / ours:.1f}×)" for ms in flows)
        lines.append([row["model"], f"{row['numel']:,}", row["buckets"], *figures, *device, *peers])
    head = ["", "elements", "buckets", "floor, ms", "compress, ms", "times the floor", "launches a bucket"]
    return markdown([*head, "device busy, ms", f"{TOPK}, ms", f"{PUBLISHED}, ms", f"{GAUSSIAN}, ms"], lines)


def host_table(rows: list[dict[str, Any]]) -> str:
    """The device's and the host's time in compress; a dash for what a row of an older run does not have."""
    lines = []
    for row in rows:
        whole, busy, waits = row["compress"]["ms"], row["busy_ms"], row.get("host_waits_ms")
        idle = _figure(None if busy is None else max(0, whole - busy), ".3f")
        waiting = _figure(None if waits is None else waits / whole, ".0%")
        lines.append([row["model"], idle, _figure(row.get("host_launches_ms"), ".3f"), waiting])
    return markdown(["compress", "device idle, ms", "host launches for, ms", "host waits, of the time"], lines)


def decode_table(rows: list[dict[str, Any]]) -> str:
    """Decode of eight packets."""
    lines = []
    for row in rows:
        ms, pinned = row["decode"]["ms"], _figure(row.get("decode_pinned", {}).get("ms"), ".3f")
        device = _figure(row.get("decode_launches"), ".1f"), _figure(row.get("decode_busy_ms"), ".3f")
        lines.append([row["model"], f"{ms:.3f}", f"{ms / row['compress']['ms']:.2f}×", pinned, *device])
    head = ["decode of 8 packets", "ms", "times compress", "from pinned memory, ms", "launches a bucket"]
    return markdown([*head, "device busy, ms"], lines)


def _figure(value: float | None, form: str) -> str:
    """Format a figure; a dash if it was not measured."""
    return "–" if value is None else format(value, form)


def step_table(rows: list[dict[str, Any]]) -> str:
    """Whole steps of real models, alone and with all of an exchange but the network."""
    lines = []
    for row in rows:
        times, waits = (f"{row[way]['ms']:.1f}" for way in STEP_WAYS), row["compressed"]["waits"]
        memory = ["" if row[way]["memory"] is None else f"{row[way]['memory']:.2f}" for way in STEP_WAYS[::2]]
        waiting = "" if waits is None else f"{waits:.1%}"
        lines.append([row["model"], row["optimizer"], *times, f"{added(row):+.1f} %", waiting, *memory])
    head = ["whole step", "optimizer", "alone, ms", "DDP with an empty hook, ms", "compressed, ms", "added"]
    return markdown([*head, "host waits", "memory alone, GiB", "compressed, GiB"], lines)


def added(row: dict[str, Any]) -> float:
    """Percent that compression adds to a step."""
    return 100.0 * (row["compressed"]["ms"] / row["alone"]["ms"] - 1)


def verdicts(found: dict[str, Any]) -> list[str]:
    """Whether each bar is met, in a line."""
    lines = []
    for row in found.get("models", []):
        ours, limit = row["compress"]["ms"], SLOWER_AT_MOST if row["numel"] >= LARGE else SMALL_SLOWER_AT_MOST
        lines += [
            _line(f"{row['model']}: compress, times the floor", ours / row["floor_ms"], most=limit),
            _line(f"{row['model']}: decode, times compress", row["decode"]["ms"] / ours, most=DECODE_AT_MOST),
            _line(f"{row['model']}: faster than {TOPK}", row[TOPK]["ms"] / ours, least=OVER_TOPK),
            _line(f"{row['model']}: faster than {PUBLISHED}", row[PUBLISHED]["ms"] / ours, least=OVER_PUBLISHED),
        ]
        if row["launches"] is not None:
            lines.append(_line(f"{row['model']}: launches a bucket", row["launches"], most=MOST_LAUNCHES))
        if row.get("busy_ms") is not None:
            idle = 100 * max(0.0, 1 - row["busy_ms"] / ours)
            lines.append(_line(f"{row['model']}: the device waits for the host, percent", idle, most=IDLE_AT_MOST))
    for row in found.get("steps", []):
        limit = ADDED_AT_MOST[row["optimizer"]]
        lines.append(_line(f"{row['model']}: added to a step, percent", added(row), most=limit))
    return lines


def _line(what: str, value: float, least: float | None = None, most: float | None = None) -> str:
    met = (least is None or value >= least) and (most is None or value <= most)
    bar = f"at least {least:g}" if least is not None else f"at most {most:g}"
    return f"{'met   ' if met else 'MISSED'} {what}: {value:.2f} ({bar})"


def _count(what: str, verdicts: dict[str, str]) -> str:
    well = sum(text in ("", "ok") for text in verdicts.values())
    return f"{what}: {well} of {len(verdicts)} passed"


def quality_table(runs: dict[str, Any]) -> str:
    """Losses of compressed runs beside the dense run of the same ranks and seed, then the mean gap of each."""
    found = [each for each in runs.values() if not each["diverged"]]
    dense = {_place(each): each for each in found if "traffic" not in each}
    lines, gaps = [], defaultdict(list)
    for each in found:
        if "traffic" in each and _place(each) in dense:
            beside, variant = dense[_place(each)]["loss"], each["run"]["variant"]
            gaps[variant].append(each["loss"] - beside)
            place = f"{variant}, N = {each['run']['workers']}, seed {each['run']['seed']}, {each['device']}"
            losses = f"{beside:.4f}", f"{each['loss']:.4f}", f"{gaps[variant][-1]:+.4f}"
            lines.append([place, f"{each['steps']:,}", *losses, f"1/{1 / each['traffic']:.1f}"])
    head = ["GPT of 124 M", "steps", "dense, nats", "compressed, nats", "gap", "bytes"]
    means = [
        f"- {variant}: {spread(values, '+.4f')} nats, {len(values)} run{'s' * (len(values) > 1)}"
        for variant, values in gaps.items()
    ]
    return "\n\n".join([markdown(head, lines), "\n".join(means)])


def _place(found: dict[str, Any]) -> tuple[Any, ...]:
    """Everything in which a dense run and a compressed run beside it are alike."""
    return found["run"]["workers"], found["run"]["seed"], found["steps"], found["rate"], found["text"]


def keep_quality(file: Path) -> None:
    """Keep the runs of `scripts/gpu_quality`: table and results."""
    runs = dict(sorted(read_results(file).items(), key=lambda found: list(found[1]["run"].values())))
    shutil.copy(file, RESULTS)
    report.write_into_page(report.ROOT / "docs" / "cuda.md", "gpu quality", quality_table(runs))


def main() -> None:
    """Keep what a folder holds: ``python -m benchmarks.gpu.page FOLDER``."""
    folder = Path(sys.argv[1])
    if (folder / "gpu-quality.json").exists():
        keep_quality(folder / "gpu-quality.json")
    if not (folder / "gpu.json").exists():
        return
    kept = read_results(folder / "gpu.json")
    machine, figures = kept["environment"], kept["figures"]
    if "interpreter" in machine["device"]:
        sys.exit("these are of Triton's interpreter, on no GPU: nothing here is a speed")
    shutil.copy(folder / "gpu.json", RESULTS)
    parts = [
        f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}; "
        + "; ".join(_count(what, figures[name]) for name, what in _WITH_VERDICTS.items() if name in figures),
        tables(figures),
        "\n".join(f"- {line}" for line in verdicts(figures)),
    ]
    report.write_into_page(report.ROOT / "docs" / "cuda.md", "gpu", "\n\n".join(parts))


if __name__ == "__main__":
    main()
