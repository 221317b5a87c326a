"""Runs of the learning-quality study, followed step by step; in a process of their own, whose arithmetic they set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks.quality.training import MakeRanks, Run, simulated, train
from benchmarks.report import pool
from dgc_horovod.compression import PRESETS
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.wire.bucket import Bucket, Segment

STEPS = 80


def in_processes(function: Callable[..., Any], words: Iterable[Any]) -> list[Any]:
    """`function` of each of `words`, two at a time: `train` sets torch's threads and its treatment of denormals."""
    with pool(2) as workers:
        return list(workers.map(function, words))


def followed(run: Run, make_ranks: MakeRanks = simulated) -> dict[str, list[Any]]:
    """The bits of rank 0's (or a real rank's own) weights, and the loss, after each of the first steps of a run."""
    found: dict[str, list[Any]] = {"weights": [], "losses": []}

    def watch(ranks: Any, step: int, loss: float) -> None:
        bits = [p.detach().numpy().tobytes() for p in ranks.optimizer.param_groups[0]["params"]]
        found["weights"].append(hashlib.sha256(b"".join(bits)).hexdigest())
        found["losses"].append(loss)

    train(run, make_ranks, steps=STEPS, points=1, watch=watch)
    return found


def selected(x: np.ndarray, density: float, rule: str) -> tuple[int, float]:
    """How many elements a rule selects from x, and the remainder ``|x - C(x)|^2 / |x|^2``."""
    config = DGCConfig(**{**PRESETS["topk"], "rule": rule, "density": density, "values": "fp32"})
    engine = BucketEngine(Bucket(0, (Segment("x", 0, x.size),)), config, registry.choose("cpu"), 0, 1)
    engine.add_gradient(0, np.ascontiguousarray(x, np.float32), ErrorFeedback())
    count = engine.compress(1.0, 0, config.density).count
    left = engine.kernels.to_host(engine.state.v).astype(np.float64)
    return count, float(np.sum(left**2) / np.sum(x.astype(np.float64) ** 2))


def selected_from(ranks: Any) -> Iterator[np.ndarray]:
    """What rank 0 has selected from in the last step, tensor by tensor: what is left, and what was sent (as fp32)."""
    for engine in (engine for engine in ranks.exchanges[0].engines if not engine.bucket.uncompressed):
        v, sent = engine.kernels.to_host(engine.state.v).copy(), engine.exchange.contributions[0]
        v[sent.positions] += sent.values
        yield from (v[segment.place] for segment in engine.bucket.segments)
