"""Where the time of compress goes: each call of the native library beside its memory alone, for SGD and for AdamW."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.kernels.bench import Model, Scatter, Stream
from benchmarks.kernels.speed import STEPS, Row
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES
from benchmarks.timing import WARM_UP, timed, times, torch_threads, wall_clock
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
    """The native library; counts the milliseconds of its calls by stage, on a clock, in every step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._library, self._clock = load(), clock
        self.steps: list[dict[str, float]] = []

    def begin_step(self) -> None:
        """Count from here on for the next step."""
        self.steps.append(defaultdict(float))

    def milliseconds(self, stage: str) -> list[float]:
        """Of each step after the warm-up."""
        return [step[stage] for step in self.steps[WARM_UP:]]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, stage = getattr(self._library, name), _STAGES.get(name)

        def called(*arguments: Any) -> Any:
            start = self._clock()
            try:
                return function(*arguments)
            finally:
                if stage is not None and self.steps:
                    self.steps[-1][stage] += 1e3 * (self._clock() - start)

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
    loop, settle = partial(stream.run, model.gradients.flat), partial(scatter.settle, u, v)
    floor, whole, alone = timed(loop, partial(_compress, model, library), settle, before=model.gradients.advance)
    parts = {stage: statistics.median(library.milliseconds(stage)) for stage in STAGES}
    what = {"model": name, "density": density, "instructions": kernels.instructions, "k": scatter.positions.size}
    return {**what, "floor_ms": floor, "whole_ms": whole, "scatter_ms": alone, "stages_ms": parts}


def _compress(model: Model, library: TimedLibrary) -> None:
    library.begin_step()
    model.compress()


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
    """Milliseconds of the loop, the whole and the calls, taken in turns."""
    library = TimedLibrary(ADAM_CLOCK)
    kernels, rows = NativeKernels(library=library), []
    model, widest = Model(SHAPES[name](), DGCConfig(density=ADAM_DENSITY), kernels, adam=True), kernels.instructions
    model.accumulate(ADAM_STEPS)
    loop = partial(Stream(model.numel, momentum=False).run, model.gradients.flat)
    for instructions in ("AVX2", "AVX-512"):
        if kernels.use_instructions(instructions):
            library.steps.clear()
            found = times(
                loop, partial(_compress, model, library), before=model.gradients.advance, runs=ADAM_ROUNDS,
                clock=partial(wall_clock, now=ADAM_CLOCK),
            )  # fmt: skip
            found += [library.milliseconds(call) for call in ADAM_STAGES]
            what = {"model": name, "density": ADAM_DENSITY, "instructions": instructions, "numel": model.numel}
            rows.append({**what, **dict(zip(("loop", "whole", *ADAM_STAGES), map(_least, found), strict=True))})
    kernels.use_instructions(widest)
    return rows


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
