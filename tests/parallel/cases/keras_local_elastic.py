"""Keras' local steps and elastic state on real ranks: commits, restores and meetings, within a round too."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.functions import allgather_object

from dgc_horovod.tensorflow.keras import Compression, DistributedOptimizer, elastic
from dgc_horovod.testing.tensorflow import session
from tests.helpers.errors import error_of
from tests.helpers.keras_training import fingerprint, shard, smooth_model, weights

H = 4
MAKE: dict[str, Callable[[], Any]] = {
    "AdamW": lambda: keras.optimizers.AdamW(2e-3, weight_decay=0.01),
    "SGD": lambda: keras.optimizers.SGD(0.02, momentum=0.9),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
}


def _in_an_elastic_job(case: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(case)
    def elastic_case() -> Any:
        hvd.init()
        os.environ["HOROVOD_ELASTIC"] = "1"
        try:
            return case()
        finally:
            del os.environ["HOROVOD_ELASTIC"]

    return elastic_case


def _made(name: str, **state: Any) -> tuple[Any, Any]:
    """A model whose optimizer makes local steps, and their state."""
    model = smooth_model()
    compression = Compression.local(H, density=0.05, min_numel=16, outer_momentum=0.5, outer_rate=0.7, check_every=1)
    model.compile(DistributedOptimizer(MAKE[name](), compression=compression), "mse")
    return model, elastic.KerasState(model, batch=0, **state)


def _train(model: Any, steps: int) -> None:
    x, y = shard(hvd.rank())
    for step in range(steps):
        here = slice(16 * (step % 8), 16 * (step % 8) + 16)
        model.train_on_batch(x[here], y[here])


def _inner(model: Any) -> list[float]:
    """Sums of the inner optimizer's state of this rank."""
    return [float(np.asarray(slot.numpy(), np.float64).sum()) for slot in model.optimizer.variables[2:]]


def _residual(model: Any) -> list[float]:
    """Sums of `e` of this rank."""
    tensors = session(model.optimizer).residuals().tensors
    return [float(arrays["v"].sum(dtype=np.float64)) for _, arrays in sorted(tensors.items())]


def _everything(model: Any) -> list[Any]:
    stats = model.optimizer.compression_stats()
    outer = [float(x.numpy().sum()) for x in session(model.optimizer).rounds.outer]
    return [fingerprint(model), _inner(model), _residual(model), outer, int(model.optimizer.iterations), stats["steps"]]


def _spread(model: Any) -> float:
    """How far apart the ranks' weights are."""
    every = np.stack(allgather_object(weights(model), name="spread"))
    return float(np.abs(every - every[:1]).max())


@_in_an_elastic_job
def going_back() -> dict[str, Any]:
    """Commit, train, go back, train the same again: bit for bit, from within a round and right after an exchange."""
    found = {}
    for name in MAKE:
        for committed_at in (2 * H + 2, 2 * H):
            model, state = _made(name)
            state.sync()
            _train(model, committed_at)
            state.commit()
            at_commit, runs, rest = fingerprint(model), [], 3 * H - committed_at % H
            for _ in range(2):
                _train(model, rest)
                runs.append(_everything(model)[:5])
                state.restore()
            found[f"{name} {committed_at}"] = [runs[0] == runs[1], fingerprint(model) == at_commit]
    return found


@_in_an_elastic_job
def broken_off() -> dict[str, Any]:
    """An exchange that fails half-way: to go back is to be where the commit was, and the next exchange is sound."""
    model, state = _made("AdamW")
    state.sync()
    _train(model, H + 2)
    state.commit()
    before = fingerprint(model)
    buckets, left = session(model.optimizer).buckets, HorovodInternalError("a worker has left")
    with mock.patch.object(buckets, "aggregate", side_effect=left):
        failed = error_of(lambda: _train(model, 2))
    state.restore()
    same, calls = fingerprint(model) == before, int(session(model.optimizer).rounds.calls)
    _train(model, H - 2)
    calls_left = int(session(model.optimizer).rounds.calls)
    return {"failed": failed, "same": same, "calls": calls, "spread": _spread(model), "left": calls_left}


@_in_an_elastic_job
def meeting() -> dict[str, Any]:
    """Ranks meet within a round: weights and outer momentum of rank 0, and what else is each rank's own stays."""
    found = {}
    for name in ("AdamW", "SGD"):
        model, state = _made(name)
        state.sync()
        _train(model, 3 * H + 2)
        apart, first = _spread(model), hvd.broadcast(weights(model), 0).numpy()
        kept = [_inner(model), _residual(model)]
        state.sync()
        rounds = session(model.optimizer).rounds
        found[name] = {
            "apart": apart, "spread": _spread(model), "rank 0's": bool((weights(model) == first).all()),
            "kept": [_inner(model), _residual(model)] == kept, "differ": len(set(allgather_object(repr(kept)))),
            "calls": int(rounds.calls), "outer": any(bool(x.numpy().any()) for x in rounds.outer),
        }  # fmt: skip
        _train(model, 2 * H - 2)
        found[name]["then"] = _spread(model)
    return found


@_in_an_elastic_job
def newcomer() -> dict[str, Any]:
    """Rank 1 has made no step yet: it takes over the inner optimizer and the outer momentum of rank 0."""
    found = {}
    for name in ("AdamW", "SGD"):
        model, state = _made(name)
        if hvd.rank() == 0:
            _train(model, H - 2)  # which needs nobody
            for momentum in session(model.optimizer).rounds.outer:
                momentum.assign(momentum + 1)
        own = _inner(model)
        state.sync()
        outer = [float(x.numpy().mean()) for x in session(model.optimizer).rounds.outer]
        found[name] = {
            "alike": len(set(allgather_object(repr(_inner(model))))), "as before": _inner(model) == own,
            "momentum": outer, "iterations": int(model.optimizer.iterations),
        }  # fmt: skip
        _train(model, 2)
        found[name]["then"] = _spread(model)
    return found


@_in_an_elastic_job
def renewed() -> dict[str, Any]:
    """The exchange is made anew within a round, as where a host has left and Horovod calls no sync."""
    ends = []
    for anew in (False, True):
        model, state = _made("SGD")
        state.sync()
        _train(model, 2 * H + 2)
        if anew:
            state.reset()
        _train(model, 2 * H - 2)
        ends.append(_everything(model)[:5])
    return {"same": ends[0] == ends[1]}


@_in_an_elastic_job
def flushed() -> dict[str, Any]:
    """A commit that flushes ends the round; where no step was made since the last one it does nothing."""
    model, state = _made("AdamW", flush_on_commit=True)
    state.sync()
    _train(model, H + 2)
    state.commit()
    left, spread, before = any(_residual(model)), _spread(model), fingerprint(model)
    state.commit()
    idle = fingerprint(model) == before
    _train(model, 2)
    state.commit()
    return {"left": left, "spread": spread, "idle": idle, "again": _spread(model)}
