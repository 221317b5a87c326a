"""One step of a method against plain NumPy, in the run that is timed: an exchange that is not done is not fast."""

from __future__ import annotations

import zlib

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.exchange.gradients import Gradients
from benchmarks.exchange.methods import MOMENTUM, CompressedMethod, Method, OwnMethod, PublishedMethod
from benchmarks.exchange.process_groups import POWER_SGD_RANK, PowerSGDMethod
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.testing.torch import session

_LEAST_OF_K = 2 / 3  # that a rule other than the exact one may send
_FP16_ERROR = 2e-3  # relative; fp32 is far below


def checked_step(method: Method, gradients: Gradients, rank: int, workers: int, step: int) -> str:
    """Do one more step and check it.

    Args:
        method: that has been run already.
        gradients: of the model.
        rank: of this worker among `workers`.
        workers: N.
        step: its number.

    Returns:
        What was found to hold, in words.

    Raises:
        AssertionError: something does not.
    """
    method.clear()
    residual = _Residual(method, gradients, rank, step) if isinstance(method, CompressedMethod) else None
    method.forward(gradients.of(rank, step)).backward()  # type: ignore[no-untyped-call]
    method.finish()
    if not method.sends:
        return "nothing is sent"
    assert len(set(method.gathered(_mark(method)))) == 1, "the ranks' gradients differ after the exchange"
    assert all(torch.isfinite(gradient).all() for gradient in method.gradients), "not finite"
    if residual is not None:
        found = residual.check()
    elif isinstance(method, PublishedMethod):
        found = _check_published(method)
    elif isinstance(method, OwnMethod):
        found = _check_sent(method)
    elif isinstance(method, PowerSGDMethod):
        found = _check_rank(method)
    else:
        found = _check_mean(method, gradients, workers, step)
    return f"bits equal on all ranks; {found}"


def _mark(method: Method) -> int:
    value = 0
    for gradient in method.gradients:
        value = zlib.adler32(memoryview(gradient.numpy()).cast("B"), value)
    return value


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


def _check_published(method: PublishedMethod) -> str:
    """Every rank's selection arrived: between k and N*k elements, with some leeway, since its search may end early."""
    compressed = [g for g, p in zip(method.gradients, method.model.tensors, strict=True) if p.dim() > 1]
    count, k = sum(int(g.count_nonzero()) for g in compressed), method.exchange.k
    assert 0.5 * k <= count <= hvd.size() * k, f"{count} elements were sent, k is {k}"
    return f"{count} elements were sent, k is {k}"


def _check_sent(method: OwnMethod) -> str:
    """What came back of compressed tensors are the elements that the ranks have sent: from k to N*k of them."""
    buckets, workers = session(method.optimizer).exchange, session(method.optimizer).exchange.collectives.workers
    gradients = {name: p.grad for p, name in session(method.optimizer).exchange.names.items()}
    sparse = [engine for engine in buckets.engines if not engine.bucket.uncompressed]
    k = sum(int(np.ceil(buckets.config.final_density * engine.bucket.numel)) for engine in sparse)
    count = sum(int(gradients[s.name].count_nonzero()) for engine in sparse for s in engine.bucket.segments)
    assert k <= count <= workers * k, f"{count} elements came back, k is {k}"
    return f"{count} elements came back, k is {k}"


def _check_rank(method: PowerSGDMethod) -> str:
    """PowerSGD's result is a product of thin matrices: seen on the smallest that is large enough."""
    wide = [p for p in method.model.tensors if p.dim() > 1 and min(p.shape[0], p[0].numel()) >= 64]
    grad = min(wide, key=torch.numel).grad
    assert grad is not None
    rank = int(torch.linalg.matrix_rank(grad.view(grad.shape[0], -1), rtol=1e-4))
    assert 1 <= rank <= POWER_SGD_RANK, f"a matrix came back with rank {rank}"
    return f"a matrix of rank {rank}"


class _Residual:
    """The first compressed bucket of a method: u and v before a step, and what NumPy says they are after it."""

    def __init__(self, method: CompressedMethod, gradients: Gradients, rank: int, step: int) -> None:
        buckets = session(method.optimizer).exchange
        self._engine: BucketEngine = next(engine for engine in buckets.engines if not engine.bucket.uncompressed)
        self._exact = buckets.config.rule == "exact"
        self._k = max(1, int(np.ceil(buckets.config.final_density * self._engine.bucket.numel)))
        places = {name: i for i, name in enumerate(method.model.names)}
        self._numbers = [places[segment.name] for segment in self._engine.bucket.segments]
        g = np.concatenate([gradients.one(i, rank, step).view(-1).numpy() for i in self._numbers])
        self._u = np.float32(MOMENTUM) * self._engine.state.momentum() + g
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
        """What stands in ``p.grad`` is the mean of what left the ranks' residuals."""
        total = np.zeros(self._engine.bucket.numel, np.float32)
        everyone = [hvd.allgather(torch.from_numpy(x), name=f"check.{x.dtype}") for x in (positions, values)]
        np.add.at(total, everyone[0].numpy(), everyone[1].numpy())
        update = np.concatenate([self._method.gradients[i].numpy() for i in self._numbers])
        worst = np.abs(update - total / hvd.size()).max() / np.abs(total).max()
        assert worst < 1e-6, f"the update is {worst:.2g} away from the mean of what was sent"
