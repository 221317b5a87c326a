"""AdamW by error feedback on ``g / sqrt(v)``, with one factored second moment that all ranks share, as a trial.

``d = m / (sqrt(R C^T / mean(R)) + eps);  v += d;  s = select(v);  v -= decoded(s);  w -= lr * (mean_i(s_i) + wd * w)``
with row and column means R and C of the mean gradient's square (Adafactor, arXiv 1804.04235) and ``m = b1*m +
(1-b1)*g``. Selection, codecs and packets are those of the product; small tensors are stock AdamW's, on their average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks.quality.simulation import CompressedRanks, LossOf
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback

EXACT, SKETCH, SQUARES = "exact", "sketch", "squares"


@dataclass(frozen=True)
class Shared:
    """How the second moment is learnt.

    Args:
        b1: of each rank's first moment, in [0, 1).
        b2: of the second moment; None: the optimizer's.
        source: rows and columns of the mean gradient's square: "exact", estimated by random signs ("sketch": ``(G s)^2
            / b``), or from the mean of the ranks' own squares ("squares").
        probes: of a sketch, >= 1.
        every: steps from one exchange of statistics to the next, >= 1.
        noise: whether own squares are multiplied by the share of the mean gradient in them, one number a tensor.
        late: whether a step divides by what was known before it; the first one by this rank's own squares.
        floor: of R and C in their mean, in [0, 1).
        present: whether R has this rank's present gradient in it, as Adam has, where that is more.
        rate: factor of the learning rate.
    """

    b1: float = 0.0
    b2: float | None = None
    source: str = EXACT
    probes: int = 4
    every: int = 1
    noise: bool = True
    late: bool = True
    floor: float = 1e-2
    present: bool = False
    rate: float = 1.0


class _Factors:
    """R and C of one tensor of a x b, and the noise factor's parts: sums of decayed terms, `weight` that of ones."""

    def __init__(self, a: int, b: int) -> None:
        self.rows, self.columns = torch.zeros(a), torch.zeros(b)
        self.weight, self.own, self.mean = 0.0, 0.0, 0.0

    def add(self, decay: float, rows: Tensor, columns: Tensor, own: float = 0.0, mean: float = 0.0) -> None:
        self.rows.mul_(decay).add_(rows, alpha=1 - decay)
        self.columns.mul_(decay).add_(columns, alpha=1 - decay)
        self.weight = decay * self.weight + 1 - decay
        self.own, self.mean = decay * self.own + (1 - decay) * own, decay * self.mean + (1 - decay) * mean


class SharedMomentRanks(CompressedRanks):
    """See the module.

    Args:
        shared: how the second moment is learnt.
        local_clip: L2 norm at which the averaged gradient is clipped: on each rank at sqrt(N) times it; or None.
        seed: of a sketch's signs.
        others: see `CompressedRanks`; its config has neither clipping nor momentum correction.
    """

    def __init__(self, *others: Any, shared: Shared, local_clip: float | None, seed: int, **named: Any) -> None:
        super().__init__(*others, **named)
        self._shared, self._local_clip = shared, local_clip
        self._matrices = self.exchanges[0].compressed
        self._shapes = {p: (p.shape[0], p.numel() // p.shape[0]) for p in self._matrices}
        self._factors = {p: _Factors(*shape) for p, shape in self._shapes.items()}
        self._firsts: list[dict[Tensor, Tensor]] = [
            {p: torch.zeros_like(p) for p in self._matrices} for _ in range(self.workers if shared.b1 else 0)
        ]
        self._signs, self._steps = Generator().manual_seed(7 + seed), 0
        self._b2 = self._group["betas"][1] if shared.b2 is None else shared.b2

    def step(self, loss_of: LossOf) -> float:
        """One step of all ranks; the mean of their losses."""
        losses, gradients = [], []
        self._board.clear()
        for rank in range(self.workers):
            losses.append(self._backward(loss_of(rank)))
            gradients.append({p: p.grad for p in self.parameters.values()})
            self._clip(gradients[-1])
        if not self._shared.late:
            self._learn(gradients)
        of_first: dict[Tensor, Any] = {}
        for rank, exchange in enumerate(self.exchanges):
            for p in self.parameters.values():
                p.grad = gradients[rank][p] if p not in self._shapes else self._direction(rank, p, gradients[rank][p])
            results = {p: exchange.add_gradient(p, _as_it_is) for p in reversed(self.parameters.values())}
            of_first = of_first or {p: (p.grad, result) for p, result in results.items()}
        if self._shared.late:
            self._learn(gradients)
        self._steps += 1
        for p, (grad, _) in of_first.items():
            p.grad = grad
        for p, (_, result) in of_first.items():
            p.grad = result()
        finite = self.exchanges[0].finish()
        for exchange in self.exchanges[1:]:
            exchange.follow(finite)
        if finite:
            self._move()
        return sum(losses) / len(losses)

    def _clip(self, gradients: dict[Tensor, Tensor]) -> None:
        if self._local_clip is not None:
            norm = float(torch.nn.utils.get_total_norm(gradients.values()))
            for gradient in gradients.values():
                gradient *= min(1.0, math.sqrt(self.workers) * self._local_clip / max(norm, 1e-30))

    @torch.no_grad()
    def _direction(self, rank: int, p: Tensor, gradient: Tensor) -> Tensor:
        g, b1 = gradient, self._shared.b1
        if b1:
            g = self._firsts[rank][p].mul_(b1).add_(gradient, alpha=1 - b1) / (1 - b1 ** (self._steps + 1))
        return g / self._denominator(p, gradient).view_as(p)

    def _denominator(self, p: Tensor, gradient: Tensor) -> Tensor:
        factors, floor, own = self._factors[p], self._shared.floor, gradient.view(self._shapes[p]).square()
        if not factors.weight:
            rows, columns = own.mean(1), own.mean(0)
        else:
            rows, columns = factors.rows / factors.weight, factors.columns / factors.weight
        rows, columns = rows.clamp(min=floor * float(rows.mean())), columns.clamp(min=floor * float(columns.mean()))
        if self._shared.present and factors.weight:
            rows = torch.maximum(rows, (1 - self._b2) * own.mean(1))
        v = rows[:, None] * columns[None] / columns.mean().clamp(min=1e-38)
        if self._shared.source == SQUARES and self._shared.noise and factors.own:
            v = v * min(1.0, max(factors.mean / factors.own, 1 / self.workers))
        return v.sqrt() + self._group["eps"]

    @torch.no_grad()
    def _learn(self, gradients: list[dict[Tensor, Tensor]]) -> None:
        if self._steps % self._shared.every:
            return
        decay = self._b2**self._shared.every
        for p, factors in self._factors.items():
            every = [each[p].view(self._shapes[p]) for each in gradients]
            mean = sum(every[1:], every[0]) / len(every)
            if self._shared.source == SQUARES:
                rows = sum(g.square().mean(1) for g in every) / len(every)
                columns = sum(g.square().mean(0) for g in every) / len(every)
                signs = self._draw(mean.shape[1])
                of_mean = float((mean @ signs).square().mean()) / len(signs)
                factors.add(decay, rows, columns, float(rows.mean()), of_mean)
            elif self._shared.source == SKETCH:
                rows, columns = torch.zeros(mean.shape[0]), torch.zeros(mean.shape[1])
                for _ in range(self._shared.probes):
                    right, left = self._draw(mean.shape[1]), self._draw(mean.shape[0])
                    rows += (mean @ right).square() / len(right) / self._shared.probes
                    columns += (mean.T @ left).square() / len(left) / self._shared.probes
                factors.add(decay, rows, columns)
            else:
                factors.add(decay, mean.square().mean(1), mean.square().mean(0))

    def _draw(self, count: int) -> Tensor:
        return torch.randint(0, 2, (count,), generator=self._signs).float() * 2 - 1

    @torch.no_grad()
    def _move(self) -> None:
        lr = float(self._group["lr"]) * self._shared.rate
        for p in self._matrices:
            assert p.grad is not None
            p.mul_(1 - lr * self._group["weight_decay"]).sub_(p.grad, alpha=lr)
            p.grad = None  # stock AdamW leaves it out
        self.optimizer.step()


def _as_it_is(p: Tensor) -> tuple[Accumulation, float]:
    return ErrorFeedback(), 0.0
