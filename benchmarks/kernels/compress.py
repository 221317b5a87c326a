"""Time of the whole compress: against the floor that memory sets, and against the published flows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.baselines import FLOWS, Baseline
from benchmarks.kernels.bench import MOMENTUM, Model, Stream, timed, torch_threads
from benchmarks.report import markdown
from benchmarks.shapes import SHAPES
from dgc_horovod import DGCConfig
from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.kernels.torch_eager import TorchEagerKernels

STEPS = 50


def study(quick: bool, models: Sequence[str] = tuple(SHAPES)) -> list[dict[str, Any]]:
    """A row for each model, rule, instruction set and number of threads."""
    rows = []
    for model in models[:1] if quick else models:
        for rule, density in (("exact", 0.001), ("sampled", 0.001), ("gaussian", 0.001), ("exact", 0.01)):
            rows += _ours(model, rule, DGCConfig(rule=rule, density=density))
        rows += _ours(model, "exact, bf16 momentum", DGCConfig(momentum_dtype="bf16"))
        for density in (0.001, 0.01):
            rows += _ours(model, "exact, AdamW", DGCConfig(density=density), adam=True)
        rows += _baselines(model)
    return rows


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
        try:
            with torch_threads(threads):
                floor_run = partial(stream.run, model.gradients.flat)
                ours, floor = timed(model.compress, floor_run, before=model.gradients.advance)
        finally:
            kernels.use_instructions(widest)
        row = {"model": name, "rule": rule, "density": config.density, "instructions": instructions, "threads": threads}
        rows.append({**row, "ms": ours, "floor_ms": floor})
    return rows


def _baselines(name: str) -> list[dict[str, Any]]:
    """The published flows, from the state that ours has after the same steps, on the same gradients."""
    model, rows = _model(name, DGCConfig()), []
    sparse = [engine for engine in model.engines if not engine.bucket.uncompressed]
    segments = [segment for engine in sparse for segment in engine.bucket.segments]
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
                baseline = flow([(segment.numel,) for segment in segments], 0.001, MOMENTUM)
                _give_state(baseline, sparse)
                (ms,) = timed(partial(baseline.step, gradients), before=model.gradients.advance, runs=7)
                rows.append({"model": name, "rule": baseline.name, "density": 0.001, "threads": threads, "ms": ms})
            (ms,) = timed(eager.compress, before=model.gradients.advance, runs=7)
            rows.append({"model": name, "rule": "ours, torch_eager", "density": 0.001, "threads": threads, "ms": ms})
    return rows


def _give_state(baseline: Baseline, engines: list[Any]) -> None:
    i = 0
    for engine in engines:
        for segment in engine.bucket.segments:
            here = slice(segment.start, segment.start + segment.numel)
            baseline.u[i].copy_(torch.from_numpy(engine.state.u[here]))
            baseline.v[i].copy_(torch.from_numpy(engine.state.v[here]))
            i += 1


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: time, times the floor, and how many times faster the exact rule is than the row."""
    exact = {
        (r["model"], r["threads"]): r["ms"]
        for r in rows
        if (r["rule"], r["density"]) == ("exact", 0.001) and r["instructions"] == _widest(rows, r["model"])
    }
    floors = {r["model"]: statistics.median(_floors(rows, r["model"])) for r in rows}
    lines = []
    for r in rows:
        of_floor = f"{r['ms'] / r.get('floor_ms', floors[r['model']]):.2f}×" if r["threads"] == 1 else ""
        against = f"{r['ms'] / exact[r['model'], r['threads']]:.1f}×" if "floor_ms" not in r else ""
        name = f"{r['model']}, {r['rule']}" + (f" {r['density']:.1%}" if r["density"] != 0.001 else "")
        lines.append([name, r.get("instructions", ""), r["threads"], f"{r['ms']:.1f}", of_floor, against])
    head = ["", "instructions", "threads", "ms", "times the loop (20 bytes, AdamW 12)", "ours (exact) is faster by"]
    return markdown(head, lines)


def _floors(rows: list[dict[str, Any]], model: str) -> list[float]:
    own = [r for r in rows if r["model"] == model and "floor_ms" in r and r["threads"] == 1]
    return [r["floor_ms"] for r in own if "AdamW" not in r["rule"]]


def _widest(rows: list[dict[str, Any]], model: str) -> str:
    """The instruction set that two threads were measured with; without AVX-512 a processor has another."""
    return next(r["instructions"] for r in rows if r["model"] == model and r["threads"] == 2 and "instructions" in r)
