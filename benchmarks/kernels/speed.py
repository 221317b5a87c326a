"""Times of the kernels: compress beside the floor that memory sets and the published flows, its growth, and decode.

And where the time of compress goes: each call of the native library beside its memory alone, for SGD and for AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import FLOWS
from benchmarks.kernels.bench import MOMENTUM, Model, Scatter, Stream
from benchmarks.report import label, markdown, panels, save_figure, where
from benchmarks.shapes import SHAPES
from benchmarks.timing import RUNS, WARM_UP, timed, times, torch_threads, wall_clock
from dgc_horovod import DGCConfig
from dgc_horovod.core.second_moment import INTERVAL
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.native.library import load
from dgc_horovod.kernels.torch_eager import TorchEagerKernels

STEPS = 50
MILLIONS = (20, 50, 100, 200, 400)
GROWTH_STEPS = 12  # enough for thresholds to follow; the largest vectors take seconds a step to make
OURS = ("decode_ms", "add_ms")
Row = Mapping[str, Any]


def compress(model: str) -> list[dict[str, Any]]:
    """A row for each rule, instruction set and number of threads."""
    rows = []
    for rule, density in (("exact", 0.001), ("sampled", 0.001), ("gaussian", 0.001), ("exact", 0.01)):
        rows += _ours(model, rule, DGCConfig(rule=rule, density=density))
    for density in (0.001, 0.01):
        rows += _ours(model, "exact, AdamW", DGCConfig(density=density), adam=True)
    return rows + _baselines(model)


def _model(name: str, config: DGCConfig, adam: bool = False) -> Model:
    model = Model(SHAPES[name](), config, NativeKernels(), adam=adam)
    model.accumulate(STEPS)
    return model


def _ours(name: str, rule: str, config: DGCConfig, adam: bool = False) -> list[dict[str, Any]]:
    model, rows = _model(name, config, adam), []
    stream, kernels = Stream(model.numel, momentum=not adam), NativeKernels()
    widest = kernels.instructions
    plain = ["plain"] if config == DGCConfig() and not adam else []
    for instructions, threads in [(name, 1) for name in (*plain, "AVX2", "AVX-512")] + [(widest, 2)]:
        if not kernels.use_instructions(instructions):
            continue
        with torch_threads(threads):
            loop = partial(stream.run, model.gradients.flat)
            ours, floor = timed(model.compress, loop, before=model.gradients.advance)
        kernels.use_instructions(widest)
        row = {"model": name, "rule": rule, "density": config.density, "instructions": instructions, "threads": threads}
        rows.append({**row, "ms": ours, "floor_ms": floor})
    return rows


def _baselines(name: str) -> list[dict[str, Any]]:
    """The published flows, from the state that ours has after the same steps, on the same gradients."""
    model, rows = _model(name, DGCConfig()), []
    sparse = [engine for engine in model.engines if not engine.bucket.uncompressed]
    segments = [(engine, segment) for engine in sparse for segment in engine.bucket.segments]
    gradients = [torch.from_numpy(g) for g in model.gradients.arrays[: len(segments)]]
    eager = Model(SHAPES[name](), DGCConfig(), TorchEagerKernels())
    eager.gradients.arrays = [torch.from_numpy(g) for g in model.gradients.arrays]  # type: ignore[misc]
    for ours, theirs in zip(model.engines, eager.engines, strict=True):
        theirs.state.v.copy_(torch.from_numpy(ours.state.v))
        if ours.state.u is not None:
            theirs.state.u = torch.from_numpy(ours.state.u.copy())
    for threads in (1, 2):
        with torch_threads(threads):
            for flow in FLOWS:
                baseline = flow([(segment.numel,) for _, segment in segments], 0.001, MOMENTUM)
                for i, (engine, segment) in enumerate(segments):
                    baseline.u[i].copy_(torch.from_numpy(engine.state.u[segment.place]))
                    baseline.v[i].copy_(torch.from_numpy(engine.state.v[segment.place]))
                (ms,) = timed(partial(baseline.step, gradients), before=model.gradients.advance, runs=7)
                rows.append({"model": name, "rule": baseline.name, "density": 0.001, "threads": threads, "ms": ms})
            (ms,) = timed(eager.compress, before=model.gradients.advance, runs=7)
            rows.append({"model": name, "rule": "ours, torch_eager", "density": 0.001, "threads": threads, "ms": ms})
    return rows


def compress_table(rows: Sequence[Row]) -> str:
    """Markdown: time, times the floor, and how many times faster the exact rule is than the row."""
    chosen = where(rows, rule="exact", density=0.001)
    exact = {(r["model"], r["threads"]): r["ms"] for r in chosen if r["instructions"] == _widest(chosen, r["model"])}
    floors = {r["model"]: statistics.median(_floors(rows, r["model"])) for r in rows}
    lines = []
    for r in rows:
        of_floor = f"{r['ms'] / r.get('floor_ms', floors[r['model']]):.2f}×" if r["threads"] == 1 else ""
        against = f"{r['ms'] / exact[r['model'], r['threads']]:.1f}×" if "floor_ms" not in r else ""
        name = f"{r['model']}, {r['rule']}" + (f" {r['density']:.1%}" if r["density"] != 0.001 else "")
        lines.append([name, r.get("instructions", ""), r["threads"], f"{r['ms']:.1f}", of_floor, against])
    head = ["", "instructions", "threads", "ms", "time / loop (20 bytes an element, AdamW 12)", "time / ours (exact)"]
    return markdown(head, lines)


def _floors(rows: Sequence[Row], model: str) -> list[float]:
    own = where(rows, model=model, threads=1)
    return [r["floor_ms"] for r in own if "floor_ms" in r and "AdamW" not in r["rule"]]


def _widest(rows: Sequence[Row], model: str) -> str:
    """The instruction set that two threads were measured with; without AVX-512 a processor has another."""
    return str(where(rows, model=model, threads=2)[0]["instructions"])


def decode() -> list[dict[str, Any]]:
    """N packets of k elements of one bucket of n; the same k from two sizes of n, and two k of the same n."""
    sizes = ((25, 0.001), (25, 0.004), (100, 0.001))
    return [_decoded(millions * 10**6, density, workers) for millions, density in sizes for workers in (2, 8, 32)]


def _decoded(numel: int, density: float, workers: int) -> dict[str, Any]:
    config = DGCConfig(density=density, bucket_bytes=4 * numel)
    model = Model([("weight", (1000, numel // 1000))], config, NativeKernels(), workers)
    (engine,) = model.engines
    packets = []
    for _ in range(workers):  # packets of one step that differ: the same rank, over and over
        model.step = 1
        packets.append(model.compress()[0].payload.copy())
        model.gradients.advance()
    received, output = np.concatenate(packets), np.empty(numel, np.float32)
    engine.outputs.put(0, output)
    k = int(density * numel)
    scatters = [Scatter(numel, k, seed) for seed in range(workers)]

    def alone() -> None:
        output.fill(0)
        for scatter in scatters:
            scatter.add_to(output)

    with torch_threads(1):
        decode, add, zero, scattered = timed(
            lambda: engine.receive(received), lambda: engine.aggregate_into(1 / workers), lambda: output.fill(0), alone
        )
    times = {"decode_ms": decode, "add_ms": add, "zeroing_ms": zero, "scatter_ms": scattered}
    return {"n": numel, "k": k, "workers": workers, **times}


def nanoseconds_an_element(rows: Sequence[Row], row: Row, parts: Sequence[str] = OURS) -> float | None:
    """Cost of each element received beyond those of two workers, for which the zeroing is the same."""
    (two,) = where(rows, n=row["n"], k=row["k"], workers=2)
    more = (row["workers"] - 2) * row["k"]
    return 1e6 * sum(row[part] - two[part] for part in parts) / more if more else None


def decode_table(rows: Sequence[Row]) -> str:
    """Markdown: the parts, what NumPy takes to zero the update, and what each more element received costs."""
    lines = []
    for r in rows:
        each = nanoseconds_an_element(rows, r), nanoseconds_an_element(rows, r, ["scatter_ms"])
        name = f"n = {r['n'] // 10**6} M, k = {r['k']:,}, N = {r['workers']}"
        times = [f"{r[part]:.1f}" for part in (*OURS, "zeroing_ms")]
        lines.append([name, *times, *("" if ns is None else f"{ns:.1f}" for ns in each)])
    head = ["", "check, decode ms", "zero, add ms", "zeroing by NumPy ms", "ns a further element", "of it memory alone"]
    return markdown(head, lines)


def growth() -> list[dict[str, Any]]:
    """Milliseconds of accumulate, select and encode of one bucket of d elements at 0.1%, one thread."""
    rows = []
    for millions in MILLIONS:
        numel = millions * 10**6
        with torch_threads(1):
            for rule in ("gaussian", "sampled", "exact"):
                model = _of_one_bucket(rule, numel)
                model.accumulate(GROWTH_STEPS)
                (ms,) = timed(model.compress, before=model.gradients.advance, runs=7)
                rows.append({"millions": millions, "rule": rule, "ms": ms})
            (ms,) = timed(partial(_topk, *_tensors(model)), before=model.gradients.advance, runs=7)
            rows.append({"millions": millions, "rule": "torch.topk", "ms": ms})
    return rows


def _of_one_bucket(rule: str, numel: int) -> Model:
    config = DGCConfig(rule=rule, bucket_bytes=4 * numel, density=0.001)
    return Model([("weight", (1000, numel // 1000))], config, NativeKernels())


def _tensors(model: Model) -> list[torch.Tensor]:
    state = model.engines[0].state
    return [torch.from_numpy(x) for x in (state.u, state.v, model.gradients.flat)]


def _topk(u: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> None:
    u.mul_(MOMENTUM).add_(g)
    v.add_(u)
    chosen = torch.topk(v.abs(), v.numel() // 1000, sorted=False).indices
    v.index_fill_(0, chosen, 0)
    u.index_fill_(0, chosen, 0)


def growth_table(rows: Sequence[Row], name: str = "rule", unit: str = "ns", scale: float = 1.0) -> str:
    """Markdown: time an element.

    Args:
        name: of the field by which rows are told apart.
        unit: of time.
        scale: how many of them a nanosecond is.
    """
    sizes, names = sorted({row["millions"] for row in rows}), dict.fromkeys(row[name] for row in rows)
    form = ".2f" if scale == 1 else ".0f"
    figures = {(row[name], row["millions"]): f"{scale * row['ms'] / row['millions']:{form}}" for row in rows}
    lines = [[each, *(figures[each, size] for size in sizes)] for each in names]
    return markdown([f"{unit} an element", *(f"{size:g} M" for size in sizes)], lines)


def draw_growth(rows: Sequence[Row], file: Path) -> None:
    """Time over size, both logarithmic."""
    figure, ((axes,),) = panels(width=6.4, height=4.2)
    for rule in dict.fromkeys(row["rule"] for row in rows):
        points = [(row["millions"], row["ms"]) for row in where(rows, rule=rule)]
        style = {"color": "0.45", "linestyle": "--"} if rule == "torch.topk" else {}
        axes.loglog(*zip(*points, strict=True), marker="o", label=rule, **style)
    sizes = sorted({row["millions"] for row in rows})
    axes.set_xticks(sizes, [f"{size} M" for size in sizes])
    axes.minorticks_off()
    label(axes, x="elements", y="milliseconds: accumulate, select, encode")
    axes.legend(frameon=False)
    save_figure(figure, file)


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
_TIMES = ("floor_ms", "whole_ms", "scatter_ms")


class TimedLibrary:
    """The native library; counts the milliseconds of its calls by stage, on a clock, in every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._library, self.clock = load(), clock
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
            start = self.clock()
            try:
                return function(*arguments)
            finally:
                if stage is not None and self.steps:
                    self.steps[-1][stage] += 1e3 * (self.clock() - start)

        return called


def stages() -> list[dict[str, Any]]:
    """A row for each model and density, one thread, the widest instructions that there are."""
    with torch_threads(1):
        return [row for model in ("resnet50", "vgg16") for x in (0.001, 0.01) for row in _by_stage(model, x)]


def adam() -> list[dict[str, Any]]:
    """Rows for each model, one thread, AVX2 and AVX-512, at a density of 1%."""
    with torch_threads(1):
        return [row for model in ("resnet50", "vgg16", "bert-base") for row in _by_stage(model, 0.01, adam=True)]


def _by_stage(name: str, density: float, adam: bool = False) -> list[dict[str, Any]]:
    """Milliseconds of the loop, of compress and its calls, and of settling alone, taken in turns."""
    library = TimedLibrary(time.thread_time if adam else time.perf_counter)  # others may use the machine
    kernels, rows = NativeKernels(library=library), []
    model, widest = Model(SHAPES[name](), DGCConfig(density=density), kernels, adam=adam), kernels.instructions
    model.accumulate(STEPS)
    stream, scatter = Stream(model.numel, momentum=not adam), Scatter(model.numel, int(density * model.numel))
    u, v = np.ones((2, model.numel), np.float32)
    loop, settle = partial(stream.run, model.gradients.flat), partial(scatter.settle, u, v)
    for instructions in ("AVX2", "AVX-512") if adam else (widest,):
        if kernels.use_instructions(instructions):
            library.steps.clear()
            found = times(
                loop, partial(_compress, model, library), settle, before=model.gradients.advance,
                runs=4 * INTERVAL if adam else RUNS, clock=partial(wall_clock, now=library.clock),
            )  # fmt: skip
            middle = _least if adam else statistics.median
            parts = {stage: middle(library.milliseconds(stage)) for stage in (ADAM_STAGES if adam else STAGES)}
            what = {"model": name, "density": density, "instructions": instructions, "numel": model.numel}
            rows.append({**what, **dict(zip(_TIMES, map(middle, found), strict=True)), "stages_ms": parts})
    kernels.use_instructions(widest)
    return rows


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


def _least(values: Sequence[float]) -> float:
    """The mean over the steps from one measurement of a tensor to the next, each at its least."""
    return statistics.mean(min(values[i::INTERVAL]) for i in range(INTERVAL))


def adam_table(rows: Sequence[Row]) -> str:
    """Markdown: the loop in nanoseconds an element; the calls, what is left and all together as parts of it."""
    lines = []
    for r in rows:
        found, loop, whole = r["stages_ms"], r["floor_ms"], r["whole_ms"]
        parts = [f"{ms / loop:.2f}" for ms in (*(found[call] for call in ADAM_STAGES), whole - sum(found.values()))]
        name = f"{r['model']}, {r['instructions']}"
        lines.append([name, f"{1e6 * loop / r['numel']:.2f}", *parts, f"{whole / loop:.2f}×"])
    head = ["in times of the loop", "loop, ns an element", *ADAM_STAGES, "other", "total"]
    return markdown(head, lines)
