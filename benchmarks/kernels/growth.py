"""Growth with size, as the GaussianK paper measures it: every rule and torch.topk, from 20 M to 400 M elements."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.kernels.bench import MOMENTUM, Model, timed, torch_threads
from benchmarks.report import ROOT, markdown, save_figure
from dgc_horovod import DGCConfig
from dgc_horovod.kernels.native.kernels import NativeKernels

MILLIONS = (20, 50, 100, 200, 400)
THRESHOLD = 0.9  # about 0.1% of these gradients' residual
STEPS = 12  # enough for thresholds to follow; the largest vectors take seconds a step to make
PLOT = ROOT / "docs" / "images" / "growth.svg"


def study(quick: bool) -> list[dict[str, Any]]:
    """Milliseconds of accumulate, select and encode of one bucket of d elements at 0.1%, one thread."""
    rows = []
    for millions in MILLIONS[:2] if quick else MILLIONS:
        numel = millions * 10**6
        with torch_threads(1):
            for rule in ("random", "threshold", "gaussian", "sampled", "exact"):
                model = _model(rule, numel)
                model.accumulate(STEPS)
                (ms,) = timed(model.compress, before=model.gradients.advance, runs=7)
                rows.append({"millions": millions, "rule": rule, "ms": ms})
            (ms,) = timed(partial(_topk, *_tensors(model)), before=model.gradients.advance, runs=7)
            rows.append({"millions": millions, "rule": "torch.topk", "ms": ms})
    return rows


def _model(rule: str, numel: int) -> Model:
    config = (
        DGCConfig(rule=rule, bucket_bytes=4 * numel, density=0.001)
        if rule != "threshold"
        else DGCConfig(rule=rule, bucket_bytes=4 * numel, threshold=THRESHOLD, max_density=0.002)
    )
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


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: nanoseconds an element."""
    sizes = sorted({row["millions"] for row in rows})
    figures = {(row["rule"], row["millions"]): f"{row['ms'] / row['millions']:.2f}" for row in rows}
    rules = list(dict.fromkeys(row["rule"] for row in rows))
    head = ["ns an element", *(f"{size} M" for size in sizes)]
    return markdown(head, [[rule, *(figures[rule, size] for size in sizes)] for rule in rules])


def plot(rows: list[dict[str, Any]]) -> None:
    """Time over size, both logarithmic."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for rule in dict.fromkeys(row["rule"] for row in rows):
        points = [(row["millions"], row["ms"]) for row in rows if row["rule"] == rule]
        style = {"color": "0.45", "linestyle": "--"} if rule == "torch.topk" else {}
        axes.loglog(*zip(*points, strict=True), marker="o", label=rule, **style)
    sizes = sorted({row["millions"] for row in rows})
    axes.set_xticks(sizes, [f"{size} M" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("elements")
    axes.set_ylabel("milliseconds: accumulate, select, encode")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, PLOT)
