"""One step of a method against plain NumPy, in the run that is timed: an exchange that is not done is not fast."""

from __future__ import annotations

import zlib

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks.exchange.gradients import Gradients
from benchmarks.exchange.methods import MOMENTUM, CompressedMethod, Method, PublishedMethod
from dgc_horovod.engine import BucketEngine

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
    if type(method) is Method:
        return "nothing is sent"
    marks = hvd.allgather(torch.tensor([_mark(method)]), name="check.mark")
    assert len(set(marks.tolist())) == 1, "the ranks' gradients differ after the exchange"
    if residual is not None:
        return "bits equal on all ranks; " + residual.check()
    if isinstance(method, PublishedMethod):
        return "bits equal on all ranks"
    return "bits equal on all ranks; " + _check_mean(method, gradients, workers, step)


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
        error = torch.linalg.vector_norm(method.gradients[i] - expected) / torch.linalg.vector_norm(expected)
        worst, count = max(worst, float(error)), count + expected.numel()
        if count > 1_000_000:
            break
    if getattr(method, "approximate", False):
        return f"{worst:.2g} away from the mean"
    assert worst < _FP16_ERROR, f"{worst:.2g} away from the mean"
    return f"the mean, to {worst:.1g}"


class _Residual:
    """The first compressed bucket of a method: u and v before a step, and what NumPy says they are after it."""

    def __init__(self, method: CompressedMethod, gradients: Gradients, rank: int, step: int) -> None:
        buckets = method.optimizer._dgc.buckets
        self._engine: BucketEngine = next(engine for engine in buckets.engines if not engine.bucket.whole)
        self._exact = buckets.config.rule == "exact"
        self._k = max(1, int(np.ceil(buckets.config.final_density * self._engine.bucket.numel)))
        places = {name: i for i, name in enumerate(method.model.names)}
        self._numbers = [places[segment.name] for segment in self._engine.bucket.segments]
        g = np.concatenate([gradients.one(i, rank, step).view(-1).numpy() for i in self._numbers])
        self._u = np.float32(MOMENTUM) * self._engine.momentum() + g
        self._v = self._engine.state.v + self._u
        self._method = method

    def check(self) -> str:
        """Everything that the algorithm promises of this bucket's step."""
        u, v = self._engine.momentum(), self._engine.state.v
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
