"""Where the time of compress goes: what each call of the native library takes, beside what its memory takes alone."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kernels.bench import WARM_UP, Model, Scatter, Stream, timed, torch_threads
from benchmarks.kernels.compress import STEPS
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.native.library import load

MODELS = ("resnet50", "vgg16")
_STAGES = {
    "dgc_pass": "pass",
    "dgc_keep_largest": "select",
    "dgc_kth_largest": "select",
    "dgc_keep_at_least": "select",
    "dgc_encode": "encode",
    "dgc_checksum": "encode",
    "dgc_settle": "settle",
    "dgc_measure": "measure",
}
STAGES = ("pass", "select", "encode", "settle")


class TimedLibrary:
    """The native library; counts the seconds of its calls by stage, on a clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._library, self._clock = load(), clock
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, stage = getattr(self._library, name), _STAGES.get(name)

        def called(*arguments: Any) -> Any:
            start = self._clock()
            try:
                return function(*arguments)
            finally:
                if stage is not None:
                    self.seconds[stage] += self._clock() - start

        return called


def study(quick: bool) -> list[dict[str, Any]]:
    """A row for each model and density, one thread, the widest instructions that there are."""
    with torch_threads(1):
        return [_row(model, density) for model in MODELS[: 1 if quick else None] for density in (0.001, 0.01)]


def _row(name: str, density: float) -> dict[str, Any]:
    library = TimedLibrary()
    kernels = NativeKernels(library=library)
    model = Model(SHAPES[name](), DGCConfig(density=density), kernels)
    model.accumulate(STEPS)
    stream, scatter = Stream(model.numel), Scatter(model.numel, int(density * model.numel))
    u, v = np.ones((2, model.numel), np.float32)
    found: dict[str, list[float]] = defaultdict(list)

    def compress() -> None:
        library.seconds.clear()
        model.compress()
        for stage in STAGES:
            found[stage].append(1e3 * library.seconds[stage])

    floor, whole, alone = timed(
        lambda: stream.run(model.gradients.flat), compress, lambda: scatter.settle(u, v), before=model.gradients.advance
    )
    stages = {stage: statistics.median(found[stage][WARM_UP:]) for stage in STAGES}
    what = {"model": name, "density": density, "instructions": kernels.instructions, "k": scatter.positions.size}
    return {**what, "floor_ms": floor, "whole_ms": whole, "scatter_ms": alone, "stages_ms": stages}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the loop, the stages, what is left, and all together as times the loop."""
    lines = []
    for r in rows:
        stages = r["stages_ms"]
        rest = r["whole_ms"] - sum(stages.values())
        parts = (r["floor_ms"], *(stages[stage] for stage in STAGES), r["scatter_ms"], rest, r["whole_ms"])
        name = f"{r['model']}, {r['density']:.1%}, {r['instructions']}"
        lines.append([name, *(f"{ms:.1f}" for ms in parts), f"{r['whole_ms'] / r['floor_ms']:.2f}×"])
    head = ["ms", "the 20-byte loop", *STAGES, "of which memory alone", "the rest", "whole", "times the loop"]
    return markdown(head, lines)
