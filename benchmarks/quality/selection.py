"""The remainder of selection on Gaussian vectors, and on the gradients and residuals of training runs.

The study of section 3 of the GaussianK paper (Shi et al., arXiv 1911.08772), on this project's own engine. It measures
the remainder ``|x - C(x)|^2 / |x|^2`` of a selection C of k from d elements. k drawn at random leave ``1 - k/d``; the
paper's bound for top-k of bell-shaped vectors is ``(1 - k/d)^2``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.quality.simulation import CompressedRanks, DenseRanks
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.training import Run, train
from benchmarks.report import RESULTS
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import count_for
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.wire.bucket import Bucket, Segment

KEPT = RESULTS / "quality-selection.json.xz"
VECTORS = "vectors"  # their key in the file of results
NUMEL, DRAWS = 100_000, 5
COUNTS = (10, 100, 1_000, 5_000, 10_000, 20_000, 40_000, 60_000, 80_000, 95_000)
RULES = ("exact", "gaussian", "sampled")
TASKS_LOOKED_AT = ("images", "lstm")
TRAINED = ("dense", "+ residual (TopK-SGD)", "+ warm-up (DGC)")
GRADIENTS = {", ".join(which): which for which in itertools.product(TASKS_LOOKED_AT, TRAINED)}
MOMENTS = (0.0, 0.02, 0.1, 0.5, 1.0)  # of a run, at which is looked
BINS, WIDEST = 80, 8.0  # of a histogram, in standard deviations to each side


def selected(x: np.ndarray, density: float, rule: str) -> tuple[int, float]:
    """How many elements a rule selects from x, and the remainder ``|x - C(x)|^2 / |x|^2``."""
    config = DGCConfig(**{**PRESETS["topk"], "rule": rule, "density": density, "values": "fp32"})
    engine = BucketEngine(Bucket(0, (Segment("x", 0, x.size),)), config, registry.choose("cpu"), 0, 1)
    engine.add_gradient(0, np.ascontiguousarray(x, np.float32), ErrorFeedback())
    count = engine.compress(1.0, 0, config.density).count
    left = engine.kernels.to_host(engine.state.v).astype(np.float64)
    return count, float(np.sum(left**2) / np.sum(x.astype(np.float64) ** 2))


def vectors() -> list[dict[str, Any]]:
    """The mean remainder of each rule on standard normal vectors, a row a k."""
    normal = [np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32) for seed in range(DRAWS)]
    rows = []
    for k in COUNTS:
        left = {rule: float(np.mean([selected(x, k / NUMEL, rule)[1] for x in normal])) for rule in RULES}
        rows.append({"k": k, "numel": NUMEL, **left})
    return rows


def gradients(task: str, variant: str, moments: Sequence[float] = MOMENTS) -> list[dict[str, Any]]:
    """The vectors that rank 0 selects from: each matrix at some moments of a run.

    That is the gradient with the residual (for DGC the sum of momenta), and for dense training the gradient alone.

    Args:
        task, variant: of the run, of four ranks.
        moments: when to look, in the run.

    Returns:
        Rows with ``step``, ``tensor``, ``numel``, ``k``, ``kurtosis`` (3 for a Gaussian), ``histogram`` over standard
        deviations, ``remainder`` of top-k; by rule ``counts`` in k, and ``mass``: the squares it takes, in top-k's.
    """
    run, rows = Run(task, variant), []
    looked_at = {round(moment * (run.steps - 1)) + 1 for moment in moments}

    def watch(ranks: Any, step: int, _: float) -> None:
        if step in looked_at:
            found = _residuals(ranks) if isinstance(ranks, CompressedRanks) else _gradients(ranks)
            described = ((name, _described(x, TASKS[task].settings.density)) for name, x in found.items())
            rows.extend({"step": step, "tensor": name, **figures} for name, figures in described)

    train(run, points=1, watch=watch)
    return rows


def _gradients(ranks: DenseRanks) -> dict[str, np.ndarray]:
    named = zip(ranks.parameters, ranks.gradients, strict=True)
    return {name: gradient.flatten().numpy() for name, gradient in named if gradient.dim() > 1}


def _residuals(ranks: CompressedRanks) -> dict[str, np.ndarray]:
    """v as it was before the last selection: what is left, and what was sent."""
    found = {}
    for engine in (engine for engine in ranks.exchanges[0].engines if not engine.bucket.uncompressed):
        v, sent = engine.kernels.to_host(engine.state.v).copy(), engine.exchange.contributions[0]
        v[sent.positions] += sent.values  # not rounded: the variants here send fp32
        found.update({segment.name: v[segment.place] for segment in engine.bucket.segments})
    return found


def _described(x: np.ndarray, density: float) -> dict[str, Any]:
    k = count_for(x.size, density)
    scaled = (x - x.mean()) / x.std()
    histogram = np.histogram(scaled, BINS, (-WIDEST, WIDEST))[0]
    found = {rule: selected(x, density, rule) for rule in RULES}
    most = 1 - found["exact"][1]
    return {
        "numel": x.size, "k": k, "kurtosis": round(float((scaled.astype(np.float64) ** 4).mean()), 3),
        "remainder": round(found["exact"][1], 6), "histogram": histogram.tolist(),
        "counts": {rule: round(count / k, 4) for rule, (count, _) in found.items()},
        "mass": {rule: round((1 - remainder) / most, 4) for rule, (_, remainder) in found.items()},
    }  # fmt: skip


def complete(runs: Path) -> None:
    """Do what the file of this study that goes with a file of runs does not have.

    Raises:
        OtherMachine: the file is of another machine or of other versions.
    """
    cells = {name: partial(gradients, *which) for name, which in GRADIENTS.items()}
    file = runs.with_name(f"{runs.name.split('.')[0]}-selection.json.xz")
    report.complete(file, {VECTORS: vectors, **cells})
