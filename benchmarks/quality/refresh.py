"""A frozen second moment that is refreshed now and then, as a trial: the product has no such switch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.gradients.moments import share_second


class Refresh:
    """Every R steps all ranks average their gradients densely: ``second = b2*second + (1-b2)*mean(g)**2``.

    The mean is clipped as dense training clips it. The step itself is a compressed one.

    Args:
        every: R >= 1.
        b2: decay of the second moment, in [0, 1).
        clip_norm: L2 norm to which the mean is clipped, or None.
    """

    def __init__(self, every: int, b2: float, clip_norm: float | None) -> None:
        self._every, self._b2, self._clip_norm = every, b2, clip_norm
        self._steps = 0
        self._sums: dict[Tensor, Tensor] = {}

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Take the gradients of a rank, before they are exchanged."""
        if self._steps % self._every == 0:
            for p in parameters:
                assert p.grad is not None
                self._sums[p] = self._sums[p] + p.grad if p in self._sums else p.grad.clone()

    def close(self, exchanges: Sequence[GradientExchange]) -> None:
        """End a step after the second moment has been frozen."""
        if self._sums:
            means = {p: sum_ / len(exchanges) for p, sum_ in self._sums.items()}
            if self._clip_norm is not None:
                self._clip(means)
            for p in exchanges[0].compressed:
                fresh = (1 - self._b2) * means[p].reshape(-1) ** 2 + self._b2 * _second(exchanges[0], p)
                for exchange in exchanges:
                    share_second(exchange, p, fresh.clone())
        self._sums.clear()
        self._steps += 1

    def _clip(self, means: dict[Tensor, Tensor]) -> None:
        norm = nn.utils.get_total_norm(means.values())
        for mean in means.values():
            mean *= min(1.0, self._clip_norm / float(norm))


def _second(exchange: GradientExchange, p: Tensor) -> Tensor:
    engine, i = exchange.buckets.place[exchange.names[p]]
    return torch.as_tensor(engine.state.adam_moments()[1][engine.bucket.segments[i].place])
