"""The published selection flows, written anew in eager torch: the baselines that ours is timed against.

FROZEN: these are measures, not code to improve. They keep what the originals do, also where it is slow or wrong
(a cut by position, a search that may end anywhere, one host synchronisation after another); a change here
changes every published comparison. Nothing is sent over a network, and nothing is imported from dgc_horovod.

All accumulate alike, per tensor, with ``u = m*u + g; v = v + u``, and clear u and v where they send; they differ
in how they choose. Give them only the tensors that are compressed: they have no dense path.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch

SentRecord = tuple[torch.Tensor, torch.Tensor]


class Baseline:
    """One worker's compress step: accumulate, select, mask, tensor after tensor.

    Args:
        shapes: shapes of the compressed tensors, in the order in which `step` gets their gradients.
        density: part of every tensor to send; k is ``max(1, ceil(density * numel))``.
        momentum: m of the accumulation.
        device: where the gradients are.
    """

    name: str

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        density: float,
        momentum: float = 0.9,
        device: torch.device | str = "cpu",
    ) -> None:
        self.density = density
        self.momentum = momentum
        self.numels = [math.prod(shape) for shape in shapes]
        self.k = [max(1, math.ceil(density * numel)) for numel in self.numels]
        self.u = [torch.zeros(numel, device=device) for numel in self.numels]
        self.v = [torch.zeros(numel, device=device) for numel in self.numels]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor]) -> list[SentRecord]:
        """One worker's compress of every tensor. Returns (values fp32, indices int64) per tensor."""
        return [self.compress(i, gradient.reshape(-1)) for i, gradient in enumerate(gradients)]

    def compress(self, i: int, gradient: torch.Tensor) -> SentRecord:
        """One tensor, whose gradient is flat."""
        u, v = self.u[i], self.v[i]
        u.mul_(self.momentum).add_(gradient)
        v.add_(u)
        indices = self._select(i, v)
        values = v[indices]
        u.index_fill_(0, indices, 0)
        v.index_fill_(0, indices, 0)
        return values, indices

    def _select(self, i: int, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class PublishedDGC(Baseline):
    """The public code of Lin et al. (arXiv 1712.01887): threshold from a strided sample, adapted up to ten times.

    With k < hits <= 1.3 k it keeps the k of lowest index, whatever their size.
    """

    name = "published DGC"
    _SAMPLE_RATIO = 0.01
    _TRIES = 10
    _LOWER, _UPPER = 0.8, 1.3

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.strides = [self._stride(numel) for numel in self.numels]
        self.random = random.Random(0)

    def _stride(self, numel: int) -> int:
        """Distance of the sampled elements: of the form 32 m + 1, then shortened until the sample is large enough."""
        least = max(math.ceil(self._SAMPLE_RATIO * numel), math.ceil(2 / self.density))
        if numel <= least:
            return 1
        stride = 32 * math.ceil(numel / least / 32) + 1
        while numel // stride < least:
            stride -= 8
        return stride

    def _select(self, i: int, v: torch.Tensor) -> torch.Tensor:
        k, stride = self.k[i], self.strides[i]
        importance = v.abs()
        sample = importance if stride == 1 else importance[self.random.randrange(stride) :: stride]
        hits = math.ceil(self.density * (self.numels[i] // stride))
        threshold = torch.topk(sample, hits, sorted=False).values.min()
        indices = (importance >= threshold).nonzero().view(-1)
        if stride > 1:
            for _ in range(self._TRIES):
                if indices.numel() > self._UPPER * k:
                    indices = indices[torch.topk(importance[indices], k, sorted=False).indices]
                    break
                if indices.numel() >= self._LOWER * k:
                    break
                threshold = threshold * self._LOWER
                indices = (importance >= threshold).nonzero().view(-1)
        return indices[:k]


class PublishedGaussianK(Baseline):
    """GaussianK of Shi et al. (arXiv 1911.08772), per tensor: threshold from mean and deviation, three tries.

    The count that the last try found is sent, be it nothing or many times k.
    """

    name = "published GaussianK"
    _TRIES = 3

    def _select(self, i: int, v: torch.Tensor) -> torch.Tensor:
        k = self.k[i]
        deviation, mean = float(v.std()), float(v.mean())
        threshold = mean + deviation * NormalDist().inv_cdf(1 - self.density / 2)
        importance = v.abs()
        for _ in range(self._TRIES):
            indices = (importance > threshold).nonzero().view(-1)
            if indices.numel() < 2 * k / 3:
                threshold *= 0.5
            elif indices.numel() > 4 * k / 3:
                threshold *= 1.5
            else:
                break
        return indices


class PerTensorTopK(Baseline):
    """Exact top-k of every tensor by ``torch.topk``."""

    name = "per-tensor top-k"

    def _select(self, i: int, v: torch.Tensor) -> torch.Tensor:
        return torch.topk(v.abs(), self.k[i]).indices


FLOWS: tuple[type[Baseline], ...] = (PublishedDGC, PublishedGaussianK, PerTensorTopK)
