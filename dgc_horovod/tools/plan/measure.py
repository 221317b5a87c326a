"""Measurement of the cost of compression on this machine: the engine itself, on normal gradients."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dgc_horovod.config import FLAT, DGCConfig
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.exchange.contract import carry
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from dgc_horovod.planning.cluster import Machine
from dgc_horovod.wire.bucket import Bucket, Segment

_MOST_ELEMENTS, _WARM_UP_STEPS, _STEPS, _DECODES, _DIFFERENT_PACKETS = 16 * 2**20, 10, 7, 5, 4
_FEW, _MANY = 2, 32  # workers whose packets are decoded


def measured(machine: Machine, elements: int, config: DGCConfig) -> Machine:
    """Return `machine` with the seconds of compression and decoding of this one, on one thread by native kernels.

    The engine runs on a bucket of at most 16 Mi elements; the least of several times counts, since other programs only
    lengthen them. Memory: 17 bytes an element of the bucket.

    Args:
        machine: other times of a worker.
        elements: number of elements of the model, n >= 1.
        config: compression settings; the result holds for their density.
    """
    numel = min(elements, _MOST_ELEMENTS)
    config = config.replace(exchange=FLAT)
    (compress, few), (_, many) = (_of_workers(numel, config, workers) for workers in (_FEW, _MANY))
    sent = config.final_density * numel  # of each worker; beyond some density they are added up on the way instead
    decode = max(0.0, many - few) / ((_MANY - _FEW) * sent)
    update = max(0.0, few - _FEW * sent * decode) / numel
    return replace(machine, compress=compress / numel, encode=0.0, decode=decode, update=update)


def _of_workers(numel: int, config: DGCConfig, workers: int) -> tuple[float, float]:
    """Return the seconds to compress a step, and to decode the packets of N workers."""
    kernels = registry.choose("cpu", threads=1)
    engine = BucketEngine(Bucket(0, (Segment("weight", 0, numel),)), config, kernels, 0, workers)
    engine.outputs.put(0, kernels.new(numel))
    compress, payloads = _steps(engine, numel)
    # messages of this rank in several tries at the same step stand for those of N ranks
    buffers, exchange = [payloads[rank % len(payloads)] for rank in range(workers)], engine.exchange
    received = [carry(collective, buffers)[0] for collective in exchange.rounds]

    def decode() -> None:
        exchange.rollback()
        for number, each in enumerate(received):
            exchange.proceed(number, each, 1)
        engine.aggregate_into(1 / workers)

    return compress, min(_seconds(decode) for _ in range(_DECODES))


def _steps(engine: BucketEngine, numel: int) -> tuple[float, list[np.ndarray]]:
    """Return the least seconds of a compress after some steps, and the last messages."""
    random = np.random.default_rng(0)
    noise = random.standard_normal(numel + 2**16, dtype=np.float32)
    accumulation = MomentumCorrection(0.9) if engine.config.momentum_correction else ErrorFeedback()
    times: list[float] = []
    payloads: deque[np.ndarray] = deque(maxlen=_DIFFERENT_PACKETS)
    for _ in range(_WARM_UP_STEPS + _STEPS):
        start = int(random.integers(2**16))
        engine.add_gradient(0, engine.kernels.from_host(noise[start : start + numel]), accumulation)
        times.append(_seconds(lambda: payloads.append(engine.compress(1.0, 1, engine.config.final_density).payload)))
        payloads[-1] = payloads[-1].copy()
    return min(times[_WARM_UP_STEPS:]), list(payloads)


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
