"""Trains with other libraries on two ranks of this machine, with and without compression, a row after the other.

Per row: the weights of density 1 beside those without compression, whether the replicas are equal, bytes, the loss on
held-out data, and whether training resumes bit for bit. Tiny models; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.command import Benchmark, argument
from benchmarks.integrations import running
from benchmarks.integrations.rows import ROWS, TORCHRUN
from benchmarks.ranks import LaunchError, found_in
from benchmarks.report import RESULTS, ROOT, keep, markdown, read_results, versions, write_into_page

FILE, PAGE, COST = RESULTS / "integrations.json", ROOT / "docs" / "integrations.md", "cost"


def measure(options: argparse.Namespace) -> None:
    """Run the rows that are asked for, and keep each; the page shows them, where they are the file's that it has."""
    from tqdm import tqdm

    if options.cost:
        keep(options.file, COST, measure_cost())
    groups = running.together(options.rows or ([] if options.cost else ROWS))
    wrong = 0
    for names in (bar := tqdm(groups, unit="launch", disable=not groups)):
        bar.set_description(", ".join(names))
        for name, found in running.run(names).items():
            keep(options.file, name, {**found, "versions": versions(*running.PACKAGES)})
            for fault in running.faults(ROWS[name], found):
                wrong += 1
                bar.write(f"{name}: {fault}")
    if options.file == FILE:
        for marker, text in texts().items():
            write_into_page(PAGE, marker, text)
    if wrong:
        raise LaunchError(f"{wrong} things are not as they should be; see above")


def texts() -> dict[str, str]:
    """The tables of the page, by marker."""
    kept = read_results(FILE)
    used = {f"{name} {version}" for row in ROWS if row in kept for name, version in kept[row]["versions"].items()}
    made = f"Made by `scripts/integrations`, with {', '.join(sorted(used, key=str.lower))}."
    found = {"rows": f"{table(kept)}\n\n{made}"}
    if COST in kept:
        found["cost"] = f"{cost_table(kept[COST])} Made by `scripts/integrations --cost`."
    return found


def table(kept: Mapping[str, Any]) -> str:
    """A line for each row and way."""
    lines = []
    for name, row in ROWS.items():
        if (found := kept.get(name)) is None:
            continue
        if "missing" in found or "error" in found:
            why = f"not installed: {', '.join(found['missing'])}" if "missing" in found else "failed"
            lines.append([row.title, why, *[""] * 5])
        for way, edit in (("by_variable", row.edit), ("lines", row.lines)):
            if way in found:
                lines.append([row.title if way == "by_variable" else "", edit, *_cells(found, way)])
    head = ["", "edit", "exact", "replicas", "fewer bytes", "loss, dense", "loss", "resumed"]
    return markdown(head, lines)


def _cells(found: Mapping[str, Any], way: str) -> list[str]:
    here = found[way]
    resumed = {None: "–", True: "bit for bit", False: "DIFFERS"}[here.get("resumed")]
    exact = f"{here['distance']:.0e}" if here["distance"] else "bit for bit"
    same = "equal" if here["same"] else "DIFFER"
    return [exact, same, f"{here['saved']:.1f}×", f"{found['dense']:.3f}", f"{here['loss']:.3f}", resumed]


def _row(name: str) -> str:
    if name not in ROWS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ROWS)}")
    return name


IMPORTS, LAUNCHES = 10, 4  # of each kind, in turn
_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's own, of all its entry points
_KINDS = {"without": "0", "with": "1"}
_IMPORT = "import time; begin = time.perf_counter(); import torch; print('took', 1e3 * (time.perf_counter() - begin))"
_LOAD = """
import time, dgc_horovod_autoload
begin = time.perf_counter()
for _ in range(1000): dgc_horovod_autoload.load()
print('took', time.perf_counter() - begin)
"""
_STEPS = """
import statistics, time, torch, torch.distributed as dist
dist.init_process_group("gloo"); torch.set_num_threads(1); torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]))
optimizer, x, times = torch.optim.SGD(model.parameters(), 0.01, 0.9), torch.randn(16, 512), []
for _ in range(200):
    begin = time.perf_counter()
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
    times.append(1e3 * (time.perf_counter() - begin))
if dist.get_rank() == 0: print("took", statistics.median(times[20:]))
dist.destroy_process_group()
"""


def measure_cost() -> dict[str, Any]:
    """Times of imports and of steps, in ms, with torch's loading of entry points and without; one of ours alone, in µs.

    Raises:
        LaunchError: torch does not find our entry point here, or a launch failed.
    """
    if not any(entry.name == "dgc_horovod" for entry in importlib.metadata.entry_points(group="torch.backends")):
        raise LaunchError("torch finds no entry point of dgc_horovod here; pip install the checkout")
    steps: list[str] = [*TORCHRUN, "--no-python", sys.executable, "-c", _STEPS]
    return {
        "load_us": 1e3 * _took([sys.executable, "-c", _LOAD], "1"),
        "import_ms": _in_turn([sys.executable, "-c", _IMPORT], IMPORTS),
        "step_ms": _in_turn(steps, LAUNCHES),
    }


def _in_turn(words: Sequence[str], times: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for _ in range(times):
        for kind, switch in _KINDS.items():
            found[kind].append(_took(words, switch))
    return found


def _took(words: Sequence[str], switch: str) -> float:
    others = {name: text for name, text in os.environ.items() if not name.startswith("DGC_")}
    environment = {**others, _SWITCH: switch, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    if ended.returncode:
        raise LaunchError(f"{' '.join(words[:4])} ended with {ended.returncode}:\n{ended.stderr[-1000:]}")
    return float(found_in(ended.stdout, r"took (\S+)"))


def cost_table(found: Mapping[str, Any]) -> str:
    """Medians, and the least and the most."""
    names = {"import_ms": "`import torch`, ms", "step_ms": "a step of DDP on two ranks, ms"}
    lines = [
        [name, *(f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})" for ms in found[key].values())]
        for key, name in names.items()
    ]
    own = f"Our entry point alone takes {found['load_us']:.1f} µs, and imports nothing."
    return f"{markdown(['median (least to most)', 'without entry points', 'with'], lines)}\n\n{own}"


COMMAND = Benchmark(
    "integrations", __doc__ or "", measure, lambda options: table(read_results(options.file)), FILE,
    (
        argument("rows", nargs="*", type=_row, metavar="row", help=f"of {', '.join(ROWS)}; all if none is named"),
        argument("--cost", action="store_true", help="measure what it costs where it is not switched on"),
    ),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.main()
