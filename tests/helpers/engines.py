"""Engines of one bucket without ranks: what several of them exchange is handed over in memory."""

from __future__ import annotations

import numpy as np

from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.exchange.contract import carry
from dgc_horovod.kernels.contract import ErrorFeedback
from tests.helpers.data import as_array, as_numpy


def make_config(rule="exact", **fields):
    common = {"density": 0.1, "min_numel": 1, "compress_1d": True, "values": "fp32"}
    return DGCConfig(**{"rule": rule, **common, **fields})


def make_bucket(*sizes):
    (bucket,) = plan([TensorSpec(f"p{i}", (n,)) for i, n in enumerate(sizes)], make_config()).buckets
    return bucket


def make_engines(config, kernels, workers, *sizes):
    return [BucketEngine(make_bucket(*sizes), config, kernels, rank, workers) for rank in range(workers)]


def split(kernels, engine, g):
    return [as_array(kernels, g[s.start : s.start + s.numel]) for s in engine.bucket.segments]


def add_gradient(engine, g, accumulation):
    for i, part in enumerate(split(engine.kernels, engine, g)):
        engine.add_gradient(i, part, accumulation)


def update_of(engine, scale=1.0):
    """The update of the whole bucket, put together in poisoned memory."""
    kernels = engine.kernels
    outputs = [as_array(kernels, np.full(s.numel, np.nan, np.float32)) for s in engine.bucket.segments]
    for i, target in enumerate(outputs):
        engine.outputs.put(i, target)
    engine.aggregate_into(scale)
    finite = engine.settle()
    update = np.concatenate([as_numpy(kernels, target) for target in outputs])
    assert finite == np.isfinite(update).all()
    return update


def exchange(engines, gradients, accumulation, step, density):
    """One step of all ranks; returns what each sent, and whether all gradients were finite."""
    messages = []
    for engine, g in zip(engines, gradients, strict=True):
        add_gradient(engine, g, accumulation)
        messages.append(engine.compress(1.0, step, density))
    payloads = [message.payload for message in messages]
    for engine, received in zip(engines, carry(messages[0].round, payloads), strict=True):
        assert engine.receive(received.copy()) is None
    finite = {engine.exchange.outcome.finite for engine in engines}  # on the host it is known before `settle`
    assert len(finite) == 1
    return messages, finite.pop()


def compressed(engine, g, step, density):
    add_gradient(engine, g, ErrorFeedback())
    return engine.compress(1.0, step, density)


def reference_accumulate(u, v, g, accumulation):
    """The equations of docs/algorithm.md, written out once more."""
    if isinstance(accumulation, ErrorFeedback):
        v += g
        return
    m = np.float32(accumulation.momentum)
    u *= m
    u += g
    v += g + 0 if accumulation.nesterov else u
    if accumulation.nesterov:
        v += m * u
