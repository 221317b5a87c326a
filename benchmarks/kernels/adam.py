"""Where the time of compress goes with AdamW: calls of the native library, beside a loop over 12 bytes an element."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kernels.bench import WARM_UP, Model, Stream, torch_threads
from benchmarks.kernels.stages import STAGES, TimedLibrary
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.core.second_moment import INTERVAL
from dgc_horovod.kernels.native.kernels import NativeKernels

MODELS, DENSITY = ("resnet50", "vgg16", "bert-base"), 0.01
_STEPS, _ROUNDS = 20, 4 * INTERVAL
_CALLS = ("measure", *STAGES)
_CLOCK = time.thread_time  # others may use the machine


def study(quick: bool) -> list[dict[str, Any]]:
    """Rows for each model, one thread, AVX2 and AVX-512, at a density of 1%."""
    with torch_threads(1):
        return [row for model in MODELS[: 1 if quick else None] for row in _rows(model)]


def _rows(name: str) -> list[dict[str, Any]]:
    library = TimedLibrary(_CLOCK)
    kernels, rows = NativeKernels(library=library), []
    model, widest = Model(SHAPES[name](), DGCConfig(density=DENSITY), kernels, adam=True), kernels.instructions
    model.accumulate(_STEPS)
    stream = Stream(model.numel, momentum=False)
    for instructions in ("AVX2", "AVX-512"):
        if kernels.use_instructions(instructions):
            what = {"model": name, "density": DENSITY, "instructions": instructions, "numel": model.numel}
            rows.append({**what, **_times(model, library, stream)})
    kernels.use_instructions(widest)
    return rows


def _times(model: Model, library: TimedLibrary, stream: Stream) -> dict[str, float]:
    """Milliseconds of the loop, the whole and the calls, taken in turns."""
    found: dict[str, list[float]] = defaultdict(list)

    def take(name: str, action: Callable[[], Any]) -> None:
        model.gradients.advance()
        start = _CLOCK()
        action()
        found[name].append(1e3 * (_CLOCK() - start))

    for _ in range(WARM_UP + _ROUNDS):
        take("loop", lambda: stream.run(model.gradients.flat))
        library.seconds.clear()
        take("whole", model.compress)
        for call in _CALLS:
            found[call].append(1e3 * library.seconds[call])
    return {name: _least(values[WARM_UP:]) for name, values in found.items()}


def _least(values: Sequence[float]) -> float:
    """The mean over the steps from one measurement of a tensor to the next, each at its least."""
    return statistics.mean(min(values[i::INTERVAL]) for i in range(INTERVAL))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the loop in nanoseconds an element; the calls, what is left and all together as parts of it."""
    lines = []
    for r in rows:
        rest = r["whole"] - sum(r[call] for call in _CALLS)
        parts = [f"{ms / r['loop']:.2f}" for ms in (*(r[call] for call in _CALLS), rest)]
        loop = f"{1e6 * r['loop'] / r['numel']:.2f}"
        lines.append([f"{r['model']}, {r['instructions']}", loop, *parts, f"{r['whole'] / r['loop']:.2f}×"])
    head = ["times the loop", "the loop, ns an element", *_CALLS, "the rest", "whole"]
    return markdown(head, lines)
