"""Engines of one bucket without ranks: what several of them exchange is handed over in memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.exchange.contract import ALL, BETWEEN, INSIDE, carry
from dgc_horovod.kernels.contract import ErrorFeedback
from dgc_horovod.stats import Traffic
from tests.helpers.data import BACKENDS, as_array, as_numpy


def make_config(rule="exact", **fields):
    common = {"density": 0.1, "min_numel": 1, "compress_1d": True, "values": "fp32"}
    return DGCConfig(**{"rule": rule, **common, **fields})


def make_bucket(*sizes):
    (bucket,) = plan([TensorSpec(f"p{i}", (n,)) for i, n in enumerate(sizes)], make_config()).buckets
    return bucket


def make_engines(config, kernels, workers, *sizes):
    return [BucketEngine(make_bucket(*sizes), config, kernels, rank, workers) for rank in range(workers)]


def make_exchange(specs, config, kernels=BACKENDS[0], rank=0, workers=1, averages=True, node_size=1):
    """The exchange of an optimizer, as an adapter has it."""
    transports = {ALL: SimpleNamespace(rank=rank, workers=workers, traffic=Traffic())}
    if node_size > 1:
        transports[INSIDE] = SimpleNamespace(workers=node_size)
    return OptimizerExchange(specs, config, lambda name: kernels, transports, averages)


def split(kernels, engine, g):
    return [as_array(kernels, g[s.start : s.start + s.numel]) for s in engine.bucket.segments]


def add_gradient(engine, g, accumulation):
    for i, part in enumerate(split(engine.kernels, engine, g)):
        engine.add_gradient(i, part, accumulation)


def update_of(engine, scale=1.0):
    """The update of the whole bucket, put together in poisoned memory."""
    kernels = engine.kernels
    outputs = [as_array(kernels, np.full(s.numel, np.nan, np.float32)) for s in engine.whole.segments]
    for i, target in enumerate(outputs):
        engine.outputs.put(i, target)
    engine.aggregate_into(scale)
    finite = engine.settle()
    update = np.concatenate([as_numpy(kernels, target) for target in outputs])
    assert finite == (np.isfinite(update).all() and not engine.exchange.outcome.overflowed)
    return update


def carried(collective, buffers, engines):
    """What every rank receives in a round of its group."""
    received = [None] * len(engines)
    for engine in engines:
        place = engine.topology
        ranks = {ALL: range(len(engines)), BETWEEN: place.between, INSIDE: place.inside}[collective.group]
        received[engine.rank] = carry(collective, [buffers[rank] for rank in ranks])[list(ranks).index(engine.rank)]
    return received


def carry_all(engines, buffers, receive=BucketEngine.receive):
    """Every round of a step, from what each rank sends first."""
    for number, collective in enumerate(engines[0].exchange.rounds, 1):
        assert {engine.round for engine in engines} == {collective}
        assert {buffer.nbytes for buffer in buffers} == {collective.nbytes}
        parts = carried(collective, buffers, engines)
        found = [receive(engine, part.copy()) for engine, part in zip(engines, parts, strict=True)]
        assert all((buffer is None) == (number == len(engines[0].exchange.rounds)) for buffer in found)
        buffers = [None if buffer is None else buffer.copy() for buffer in found]


def exchange(engines, gradients, accumulation, step, density):
    """One step of all ranks; returns what each sent, and whether all gradients were finite."""
    messages = [compressed(*each, step, density, accumulation) for each in zip(engines, gradients, strict=True)]
    carry_all(engines, [message.payload.copy() for message in messages])
    finite = {engine.exchange.outcome.finite for engine in engines}  # on the host it is known before `settle`
    assert len(finite) == 1
    return messages, finite.pop()


def stepped(engines, gradients, accumulation, step=0, density=0.1, commits=True):
    """One step of all ranks; the update, which has the same bits on each and is finite."""
    exchange(engines, gradients, accumulation, step, density)
    update, *others = [update_of(engine) for engine in engines]
    assert np.isfinite(update).all() and all(other.tobytes() == update.tobytes() for other in others)
    if commits:
        for engine in engines:
            engine.commit()
    return update


def compressed(engine, g, step, density, accumulation=ErrorFeedback()):  # noqa: B008 - frozen
    """What a rank sends first."""
    add_gradient(engine, g, accumulation)
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
