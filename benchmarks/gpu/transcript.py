"""Transcripts by which kernels of any backend are compared: whole steps of several ranks, all results as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dgc_horovod import DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.exchange.contract import carry
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback, MomentumCorrection, SharedMoment
from dgc_horovod.wire.bucket import Bucket, Segment

Feeds = Callable[[Any, int, Segment], Accumulation]  # of the kernels, the step and the segment


@dataclass(frozen=True)
class Size:
    """How large a check is.

    Args:
        device: of the Triton kernels.
        numels: of a bucket's segments; odd ones, so that blocks begin and end anywhere.
        steps, ranks: of a run.
        long_run: steps of the run in which replicas must stay equal.
    """

    device: str
    numels: tuple[int, ...]
    steps: int
    ranks: int
    long_run: int = 0


def _shared_moment(kernels: Any, step: int, segment: Segment) -> SharedMoment:
    """Of rows of 100 columns, where a tensor is a run of a larger one."""
    rng = np.random.default_rng([step, segment.start])
    rows, columns = (rng.random(size).astype(np.float32) * 9 for size in (segment.numel // 100 + 2, 100))
    return SharedMoment(kernels.from_host(rows), kernels.from_host(columns), 5.0, segment.start % 70)


FEEDS: dict[str, Feeds] = {
    "momentum": lambda kernels, step, segment: MomentumCorrection(0.9),
    "Nesterov": lambda kernels, step, segment: MomentumCorrection(0.9, True),
    "no momentum": lambda kernels, step, segment: ErrorFeedback(),
    "Adam": _shared_moment,
    "several": lambda kernels, step, segment: MomentumCorrection(
        0.5 + 0.1 * (int(segment.name) % 3), int(segment.name) % 2 == 0
    ),
}

DATA: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "laplace": lambda rng, n: rng.laplace(size=n),
    "log-normal scaled": lambda rng, n: rng.standard_normal(n) * rng.lognormal(0, 2, n),
    "ties": lambda rng, n: rng.integers(-3, 4, n),
    "all equal": lambda rng, n: np.full(n, 0.75),
    "all zero": lambda rng, n: np.zeros(n),
    "few": lambda rng, n: np.where(rng.random(n) < 1e-3, rng.standard_normal(n), 0),
    "denormal": lambda rng, n: rng.integers(-1000, 1000, n) * 1e-42,
    "in one place": lambda rng, n: np.where(np.arange(n) < n // 50, 100.0, 1.0) * rng.standard_normal(n),
}


def bucket_of(numels: Sequence[int], whole: bool = False, values: str = "") -> Bucket:
    """One bucket of segments of these sizes."""
    starts = np.cumsum((0, *numels)).tolist()
    segments = (Segment(str(i), start, n) for i, (start, n) in enumerate(zip(starts, numels, strict=False)))
    return Bucket(3, tuple(segments), whole, values)


def transcript(
    kernels: Any,
    config: DGCConfig,
    size: Size,
    feeds: Feeds = FEEDS["momentum"],
    data: str = "laplace",
    whole: bool = False,
    shift: int = 0,
) -> list[bytes]:
    """Packets, states and updates of every step of a run, in which one gradient is not finite.

    Args:
        shift: elements by which gradients and updates lie off what an allocator would give.
    """
    bucket = bucket_of(size.numels, whole, config.values if whole else "")
    engines = [BucketEngine(bucket, config, kernels, rank, size.ranks) for rank in range(size.ranks)]
    said = []
    for step in range(size.steps):
        messages = []
        for rank, engine in enumerate(engines):
            g = drawn(data, bucket.numel, step, rank)
            at = step % bucket.numel
            g[at] = np.nan if (step, rank) == (size.steps - 2, 1) else g[at]
            feed(engine, g, feeds, step, shift)
            message = engine.compress(0.5, step, config.density)
            messages.append(replace(message, payload=message.payload.copy()))
        buffers: list[Any] = [message.payload for message in messages]
        for collective in engines[0].exchange.rounds:
            said += [buffer.tobytes() for buffer in buffers]
            parts = carry(collective, buffers)
            found = [engine.receive(part) for engine, part in zip(engines, parts, strict=True)]
            buffers = [None if buffer is None else buffer.copy() for buffer in found]
        for engine in engines:
            outputs = update(engine, shift)
            if not engine.outcome.finite:
                engine.rollback()
            states = (engine.state.v, engine.state.u, engine.state.remainder)
            said += [kernels.to_host(x).tobytes() for x in (*states, *outputs) if x is not None]
    return said


def drawn(data: str, numel: int, *seed: int) -> np.ndarray:
    """A gradient of one of the kinds of `DATA`."""
    return np.asarray(DATA[data](np.random.default_rng(seed), numel)).astype(np.float32)


def feed(engine: BucketEngine, g: np.ndarray, feeds: Feeds = FEEDS["momentum"], step: int = 0, shift: int = 0) -> None:
    """Give an engine the gradients of all its segments."""
    for i, segment in enumerate(engine.bucket.segments):
        given = _placed(engine.kernels, g[segment.place], shift)
        engine.add_gradient(i, given, feeds(engine.kernels, step, segment))


def update(engine: BucketEngine, shift: int = 0) -> list[Any]:
    """The update of every segment, of what an engine has received."""
    nothing = (np.full(segment.numel, np.nan, np.float32) for segment in engine.bucket.segments)
    outputs = [_placed(engine.kernels, x, shift) for x in nothing]
    for i, target in enumerate(outputs):
        engine.outputs.put(i, target)
    engine.aggregate_into(1 / engine.workers)
    engine.settle()
    return outputs


def _placed(kernels: Any, x: np.ndarray, shift: int) -> Any:
    return kernels.from_host(np.concatenate([np.zeros(shift, np.float32), x]))[shift:]
