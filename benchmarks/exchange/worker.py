"""One rank of `benchmarks.exchange`: every method in turn on one model's shapes, timed, and one step of each checked.

A step is checked against plain NumPy, in the run that is timed: an exchange that is not done is not fast.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks import connections
from benchmarks.exchange import methods
from benchmarks.exchange.methods import Method
from benchmarks.shapes import SHAPES, Gradients
from dgc_horovod.config import FLAT
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import node_process_sets

_LEAST_OF_K = 2 / 3  # that a rule other than the exact one may send
_FP16_ERROR = 2e-3  # relative; fp32 is far below


class Clock:
    """Steps of one method, timed: each begins on all ranks at once."""

    def __init__(self, method: Method, gradients: Gradients, rank: int) -> None:
        self.method, self.gradients, self.rank, self.number, self.last = method, gradients, rank, 0, 0.0

    def run(self, steps: int) -> dict[str, list[float]]:
        """Milliseconds of `steps` more: ``ms``, ``processor_ms`` and those of the method's phases."""
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(steps):
            self.method.clear()
            loss = self.method.forward(self.gradients.of(self.rank, self.number))
            before = self.method.phases()
            self.method.barrier()
            busy = time.process_time()
            start = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            self.method.finish()
            self.last = time.perf_counter() - start
            spent = {"ms": self.last, "processor_ms": time.process_time() - busy}
            phases = {name: seconds - before[name] for name, seconds in self.method.phases().items()}
            for name, seconds in {**spent, **phases}.items():
                found[name].append(1e3 * seconds)
            self.number += 1
        return found

    def longest(self) -> float:
        """Seconds of the last step, on the slowest rank."""
        return max(self.method.gathered(self.last))


def rank(order: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All methods, one after another, each with connections of its own.

    Args:
        order: ``model``, whose shapes; ``methods``, names in order; ``density``; ``seconds`` that the timed steps of a
            method should take; ``warm_up`` steps before them, where a step is short; ``fewest`` and ``most`` steps
            that are timed; ``ranks`` on a host; ``master``, address of rank 0, for torch.distributed; ``device`` of
            the network, by which ranks reach each other.
    """
    options = {"process_sets": node_process_sets(order["ranks"])} if order["ranks"] > 1 else {}
    connections.start(**options)
    os.environ[methods.MASTER] = order["master"]
    gradients = Gradients([shape for _, shape in SHAPES[order["model"]]()])
    figures = {}
    for name in order["methods"]:
        figures[name] = measure(name, order, gradients)
        gc.collect()  # the next one needs the memory
        hvd.init(**options)
    return figures


def measure(name: str, order: Mapping[str, Any], gradients: Gradients) -> dict[str, Any]:
    """The figures of one method on this rank."""
    rank, workers, seconds = hvd.rank(), hvd.size(), order["seconds"]  # Horovod may be off later
    make = (methods.METHODS if order["ranks"] == 1 else methods.NODE_METHODS)[name]
    method = make(SHAPES[order["model"]](), order["density"])
    clock = Clock(method, gradients, rank)
    clock.run(1)  # says how long a step takes, although what is set up once is in it
    clock.run(max(1, method.untimed, min(order["warm_up"], int(seconds / clock.longest()))))
    checked = checked_step(clock, workers)
    steps = max(order["fewest"], min(order["most"], int(seconds / clock.longest())))
    sent = bytes_out(order["device"])
    times = clock.run(steps)
    sent = bytes_out(order["device"]) - sent
    phases = {name: times.pop(name) for name in method.phases()}
    found = {"phases_ms": phases, "bytes": sent / steps, "state_bytes": state_bytes(method), "checked": checked}
    method.close()
    return {**times, **found}


def state_bytes(method: Method) -> int:
    """Bytes of u, v and of what an owner keeps, on this rank; of a method that has them."""
    if not isinstance(method, methods.OwnMethod):
        return 0
    states = [engine.state for engine in session(method.optimizer).exchange.engines]
    return sum(4 * len(x) for state in states for x in (state.u, state.v, state.remainder) if x is not None)


def bytes_out(device: str) -> int:
    """Bytes that have left this host; on the loopback, that have left the machine's ranks together."""
    table = Path("/proc/self/net/dev").read_text()
    found = {line[1]: int(line[2].split()[8]) for line in re.finditer(r"^ *(\w+): *(.*)$", table, re.MULTILINE)}
    return found[device]


def checked_step(clock: Clock, workers: int) -> str:
    """Do one more step of a method that has been run already, among so many workers, and check it.

    Returns:
        What was found to hold, in words.

    Raises:
        AssertionError: something does not.
    """
    method, gradients, rank, step = clock.method, clock.gradients, clock.rank, clock.number
    method.clear()
    ours = session(method.optimizer).exchange if isinstance(method, methods.CompressedMethod) else None
    residual = _Residual(method, gradients, rank, step) if ours and ours.config.exchange == FLAT else None
    method.forward(gradients.of(rank, step)).backward()  # type: ignore[no-untyped-call]
    method.finish()
    if not method.sends:
        return "nothing is sent"
    assert len(set(method.gathered(_mark(method)))) == 1, "the ranks' gradients differ after the exchange"
    assert all(torch.isfinite(gradient).all() for gradient in method.gradients), "not finite"
    if residual is not None:
        found = residual.check()
    elif ours is not None:
        return "bits equal on all ranks"  # a node's ranks share u and v, or an owner keeps what it does not send on
    elif isinstance(method, methods.PublishedMethod):
        found = _check_published(method)
    elif isinstance(method, methods.OwnMethod):
        found = _check_sent(method)
    elif isinstance(method, methods.PowerSGDMethod):
        found = _check_rank(method)
    else:
        found = _check_mean(method, gradients, workers, step)
    return f"bits equal on all ranks; {found}"


def _mark(method: Method) -> int:
    return functools.reduce(lambda mark, g: zlib.adler32(memoryview(g.numpy()).cast("B"), mark), method.gradients, 0)


def _check_mean(method: Method, gradients: Gradients, workers: int, step: int) -> str:
    """Of the last tensors, up to a million elements: the mean over the ranks, each of whose gradients is known here."""
    count, worst = 0, 0.0
    for i in reversed(range(len(gradients.shapes))):
        expected = sum(gradients.one(i, rank, step).view(-1) for rank in range(workers)) / workers
        error = float(torch.linalg.vector_norm(method.gradients[i] - expected) / torch.linalg.vector_norm(expected))
        assert error < _FP16_ERROR, f"tensor {i} is {error:.2g} away from the mean"
        worst, count = max(worst, error), count + expected.numel()
        if count > 1_000_000:
            break
    return f"the mean, to {worst:.1g}"


def _check_published(method: methods.PublishedMethod) -> str:
    """Every rank's selection arrived: between k and N*k elements, with some leeway, since its search may end early."""
    compressed = [g for g, p in zip(method.gradients, method.model.tensors, strict=True) if p.dim() > 1]
    count, k = sum(int(g.count_nonzero()) for g in compressed), method.k
    assert 0.5 * k <= count <= hvd.size() * k, f"{count} elements were sent, k is {k}"
    return f"{count} elements were sent, k is {k}"


def _check_sent(method: methods.OwnMethod) -> str:
    """Compressed tensors come back with the elements that the ranks have sent: from k to N*k of them."""
    exchange = session(method.optimizer).exchange
    gradients = {name: p.grad for p, name in exchange.names.items()}
    sparse = [engine.bucket for engine in exchange.engines if not engine.bucket.uncompressed]
    k = sum(math.ceil(exchange.config.density * bucket.numel) for bucket in sparse)
    count = sum(int(gradients[segment.name].count_nonzero()) for bucket in sparse for segment in bucket.segments)
    assert k <= count <= exchange.collectives.workers * k, f"{count} elements came back, k is {k}"
    return f"{count} elements came back, k is {k}"


def _check_rank(method: methods.PowerSGDMethod) -> str:
    """PowerSGD's result is a product of thin matrices: seen on the smallest that is large enough."""
    wide = [p for p in method.model.tensors if p.dim() > 1 and min(p.shape[0], p[0].numel()) >= 64]
    grad = min(wide, key=torch.numel).grad
    assert grad is not None
    rank = int(torch.linalg.matrix_rank(grad.view(grad.shape[0], -1), rtol=1e-4))
    assert 1 <= rank <= methods.POWER_SGD_RANK, f"a matrix came back with rank {rank}"
    return f"a matrix of rank {rank}"


class _Residual:
    """The first compressed bucket of a method: u and v before a step, and what NumPy says they are after it."""

    def __init__(self, method: Method, gradients: Gradients, rank: int, step: int) -> None:
        buckets = session(method.optimizer).exchange
        self._engine: BucketEngine = next(engine for engine in buckets.engines if not engine.bucket.uncompressed)
        self._exact = buckets.config.rule == "exact"
        self._k = max(1, int(np.ceil(buckets.config.density * self._engine.bucket.numel)))
        places = {name: i for i, name in enumerate(method.model.names)}
        self._numbers = [places[segment.name] for segment in self._engine.bucket.segments]
        g = np.concatenate([gradients.one(i, rank, step).view(-1).numpy() for i in self._numbers])
        self._u = np.float32(methods.MOMENTUM) * self._engine.state.momentum() + g
        self._v = self._engine.state.v + self._u
        self._method = method

    def check(self) -> str:
        """Everything that the algorithm promises of this bucket's step."""
        u, v = self._engine.state.momentum(), self._engine.state.v
        sent = self._v - v
        positions = np.flatnonzero(sent)
        least = self._k if self._exact else _LEAST_OF_K * self._k
        assert least <= positions.size <= self._k, f"{positions.size} elements sent, k is {self._k}"
        sizes = np.abs(self._v)
        smallest = sizes[positions].min()
        sizes[positions] = 0
        assert smallest >= sizes.max(), "an element was sent that is smaller than one that was not"
        expected_u = self._u.copy()
        expected_u[positions] = 0
        assert np.array_equal(u, expected_u), "u is not m*u + g, zero where it was sent"
        self._check_update(positions, sent[positions])
        return f"{positions.size} of {v.size} elements sent, the largest; u, v and the mean as NumPy has them"

    def _check_update(self, positions: np.ndarray, values: np.ndarray) -> None:
        """The update in ``p.grad`` is the mean of the elements that left the ranks' residuals."""
        total = np.zeros(self._engine.bucket.numel, np.float32)
        everyone = [hvd.allgather(torch.from_numpy(x), name=f"check.{x.dtype}") for x in (positions, values)]
        np.add.at(total, everyone[0].numpy(), everyone[1].numpy())
        update = np.concatenate([self._method.gradients[i].numpy() for i in self._numbers])
        worst = np.abs(update - total / hvd.size()).max() / np.abs(total).max()
        assert worst < 1e-6, f"the update is {worst:.2g} away from the mean of what was sent"
