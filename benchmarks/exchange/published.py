"""The exchange of the public DGC code (Lin et al.), written anew: two allgathers a tensor, eager torch, no coding.

What it does per tensor is what the original does: when the gradient is there, select by a sampled threshold and start
one allgather of fp32 values and one of int64 indices; when the step is finished, zero ``p.grad``, add what all ranks
sent by ``index_put_`` and divide by N. Tensors of one dimension go by an allreduce.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import horovod.torch as hvd
import torch

from benchmarks.baselines import PublishedDGC, SentRecord


class _PerTensor(PublishedDGC):
    """The selection, a tensor at a time."""

    def compress(self, i: int, gradient: torch.Tensor) -> SentRecord:
        """Values and indices of tensor `i` to send."""
        return self._compress(i, gradient.reshape(-1))


class PublishedExchange:
    """Hooks on the parameters that start the exchanges, and the wait for all of them.

    Args:
        named: names and parameters.
        density: part of every tensor to send.
        momentum: of the accumulation.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], density: float, momentum: float) -> None:
        self._named = named
        compressed = [name for name, p in named if p.dim() > 1]
        self._number = {name: i for i, name in enumerate(compressed)}
        self._flow = _PerTensor([tuple(p.shape) for _, p in named if p.dim() > 1], density, momentum)
        self.k = sum(self._flow.k)
        self._handles: dict[str, tuple[int, ...]] = {}
        self.seconds = {"compress": 0.0, "wait": 0.0, "decode": 0.0}
        for name, p in named:
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._ready(name, p))  # type: ignore[misc]

    @torch.no_grad()
    def _ready(self, name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        start = time.perf_counter()
        if name in self._number:
            values, indices = self._flow.compress(self._number[name], p.grad)
            started = [hvd.allgather_async(values, name=f"{name}.t0"), hvd.allgather_async(indices, name=f"{name}.t1")]
            self._handles[name] = tuple(started)
        else:
            self._handles[name] = (hvd.allreduce_async_(p.grad, name=name, op=hvd.Average),)
        self.seconds["compress"] += time.perf_counter() - start

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait for every tensor; ``p.grad`` is then the mean of what the ranks sent."""
        for name, p in self._named:
            assert p.grad is not None
            start = time.perf_counter()
            received = [hvd.synchronize(handle) for handle in self._handles.pop(name)]
            waited = time.perf_counter()
            if name in self._number:
                values, indices = received
                p.grad.zero_()
                p.grad.view(-1).index_put_([indices], values, accumulate=True)
                p.grad.mul_(1 / hvd.size())
            self.seconds["wait"] += waited - start
            self.seconds["decode"] += time.perf_counter() - waited
