"""Where the time of compress goes: each call of the native library beside its memory alone, for SGD and for AdamW."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.kernels.bench import Model, Scatter, Stream
from benchmarks.kernels.speed import STEPS, Row
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES
from benchmarks.timing import WARM_UP, timed, torch_threads
from dgc_horovod import DGCConfig
from dgc_horovod.core.second_moment import INTERVAL
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.native.library import load

MODELS, ADAM_MODELS, ADAM_DENSITY = ("resnet50", "vgg16"), ("resnet50", "vgg16", "bert-base"), 0.01
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
ADAM_STAGES = ("measure", *STAGES)
ADAM_STEPS, ADAM_ROUNDS = 20, 4 * INTERVAL
ADAM_CLOCK = time.thread_time  # others may use the machine


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


def stages(quick: bool) -> list[dict[str, Any]]:
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
    parts = {stage: statistics.median(found[stage][WARM_UP:]) for stage in STAGES}
    what = {"model": name, "density": density, "instructions": kernels.instructions, "k": scatter.positions.size}
    return {**what, "floor_ms": floor, "whole_ms": whole, "scatter_ms": alone, "stages_ms": parts}


def stages_table(rows: Sequence[Row]) -> str:
    """Markdown: the loop, the stages, what is left, and all together as times the loop."""
    lines = []
    for r in rows:
        found = r["stages_ms"]
        rest = r["whole_ms"] - sum(found.values())
        parts = (r["floor_ms"], *(found[stage] for stage in STAGES), r["scatter_ms"], rest, r["whole_ms"])
        name = f"{r['model']}, {r['density']:.1%}, {r['instructions']}"
        lines.append([name, *(f"{ms:.1f}" for ms in parts), f"{r['whole_ms'] / r['floor_ms']:.2f}×"])
    head = ["ms", "the 20-byte loop", *STAGES, "memory of settle alone", "other", "total", "total / loop"]
    return markdown(head, lines)


def adam(quick: bool) -> list[dict[str, Any]]:
    """Rows for each model, one thread, AVX2 and AVX-512, at a density of 1%."""
    with torch_threads(1):
        return [row for model in ADAM_MODELS[: 1 if quick else None] for row in _adam_rows(model)]


def _adam_rows(name: str) -> list[dict[str, Any]]:
    library = TimedLibrary(ADAM_CLOCK)
    kernels, rows = NativeKernels(library=library), []
    model, widest = Model(SHAPES[name](), DGCConfig(density=ADAM_DENSITY), kernels, adam=True), kernels.instructions
    model.accumulate(ADAM_STEPS)
    stream = Stream(model.numel, momentum=False)
    for instructions in ("AVX2", "AVX-512"):
        if kernels.use_instructions(instructions):
            what = {"model": name, "density": ADAM_DENSITY, "instructions": instructions, "numel": model.numel}
            rows.append({**what, **_adam_times(model, library, stream)})
    kernels.use_instructions(widest)
    return rows


def _adam_times(model: Model, library: TimedLibrary, stream: Stream) -> dict[str, float]:
    """Milliseconds of the loop, the whole and the calls, taken in turns."""
    found: dict[str, list[float]] = defaultdict(list)

    def take(name: str, action: Callable[[], Any]) -> None:
        model.gradients.advance()
        start = ADAM_CLOCK()
        action()
        found[name].append(1e3 * (ADAM_CLOCK() - start))

    for _ in range(WARM_UP + ADAM_ROUNDS):
        take("loop", lambda: stream.run(model.gradients.flat))
        library.seconds.clear()
        take("whole", model.compress)
        for call in ADAM_STAGES:
            found[call].append(1e3 * library.seconds[call])
    return {name: _least(values[WARM_UP:]) for name, values in found.items()}


def _least(values: Sequence[float]) -> float:
    """The mean over the steps from one measurement of a tensor to the next, each at its least."""
    return statistics.mean(min(values[i::INTERVAL]) for i in range(INTERVAL))


def adam_table(rows: Sequence[Row]) -> str:
    """Markdown: the loop in nanoseconds an element; the calls, what is left and all together as parts of it."""
    lines = []
    for r in rows:
        rest = r["whole"] - sum(r[call] for call in ADAM_STAGES)
        parts = [f"{ms / r['loop']:.2f}" for ms in (*(r[call] for call in ADAM_STAGES), rest)]
        loop = f"{1e6 * r['loop'] / r['numel']:.2f}"
        lines.append([f"{r['model']}, {r['instructions']}", loop, *parts, f"{r['whole'] / r['loop']:.2f}×"])
    head = ["in times of the loop", "loop, ns an element", *ADAM_STAGES, "other", "total"]
    return markdown(head, lines)
