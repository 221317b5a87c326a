"""What the installed package costs where nobody has switched it on: time of ``import torch``, and of a step of DDP."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.integrations.rows import TORCHRUN
from benchmarks.ranks import LaunchError, found_in
from benchmarks.report import ROOT, markdown

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


def measure() -> dict[str, Any]:
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


def table(found: Mapping[str, Any]) -> str:
    """Medians, and the least and the most."""
    names = {"import_ms": "`import torch`, ms", "step_ms": "a step of DDP on two ranks, ms"}
    lines = [
        [name, *(f"{statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})" for ms in found[key].values())]
        for key, name in names.items()
    ]
    own = f"Our entry point alone takes {found['load_us']:.1f} µs, and imports nothing."
    return f"{markdown(['median (least to most)', 'without entry points', 'with'], lines)}\n\n{own}"
