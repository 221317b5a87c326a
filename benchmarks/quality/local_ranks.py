"""N ranks with local steps in one process: N sets of weights, N inner optimizers, and the product's own rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks.quality.simulation import LossOf
from dgc_horovod.config import DGCConfig
from dgc_horovod.testing.loopback import Board, Loopback
from dgc_horovod.torch.gradients.collectives import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.local import LocalRounds


class LocalRanks:
    """What ``Compression.local`` does on each rank, in turn.

    A rank's own gradient is clipped to ``sqrt(N)`` times the norm of the averaged one.

    Args:
        model: model with the weights that all begin with; gradients are computed in it.
        make_optimizer: function of a model, of its inner optimizer.
        workers: N.
        clip_norm: L2 norm at which the averaged gradient would be clipped, or None.
        config: the compression.
        dense_steps: steps before the first round, of the averaged gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        workers: int,
        clip_norm: float | None,
        config: DGCConfig,
        dense_steps: int = 0,
    ) -> None:
        self._model, self._board = model, Board()
        models = [model, *(copy.deepcopy(model) for _ in range(workers - 1))]
        self._weights = [[p.data for p in each.parameters()] for each in models]
        self._parameters = [list(each.parameters()) for each in models]
        self._inner = [make_optimizer(each) for each in models]
        self._clip_norm, self._dense_left = clip_norm, dense_steps
        self._limit = None if clip_norm is None else clip_norm * math.sqrt(workers)
        self.optimizer: Any = SimpleNamespace(param_groups=[g for inner in self._inner for g in inner.param_groups])
        self._rounds = [
            LocalRounds(
                GradientExchange(
                    dict(each.named_parameters()),
                    dict.fromkeys(each.parameters(), 0),
                    config,
                    Loopback(rank, workers, self._board),
                    ReduceSettings(averages=True),
                    lambda: 1.0,
                ),
                config,
            )
            for rank, each in enumerate(models)
        ]
        self.exchange = self._rounds[0].exchange

    def step(self, loss_of: LossOf) -> float:
        """An inner step of all ranks, and the exchange where it is due; the mean of their losses."""
        if self._dense_left:
            return self._dense_step(loss_of)
        losses, is_full = [], False
        for rank, (rounds, inner) in enumerate(zip(self._rounds, self._inner, strict=True)):
            rounds.begin_step()
            losses.append(self._gradients(rank, loss_of))
            if self._limit is not None:
                nn.utils.clip_grad_norm_(self._parameters[rank], self._limit)
            inner.step()
            is_full = rounds.end_step()
        if is_full:
            self._board.clear()
            for rounds in self._rounds:
                rounds.send()
            for rounds in self._rounds:
                rounds.receive()
        self._lend(0)
        return sum(losses) / len(losses)

    def _dense_step(self, loss_of: LossOf) -> float:
        self._dense_left -= 1
        losses, gradients = [], []
        for rank in range(len(self._inner)):
            losses.append(self._gradients(rank, loss_of))
            gradients.append([p.grad for p in self._parameters[rank]])  # those of rank 0 are the next one's afterwards
        means = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        for rank, inner in enumerate(self._inner):
            for p, mean in zip(self._parameters[rank], means, strict=True):
                p.grad = mean.clone()
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters[rank], self._clip_norm)
            inner.step()
        self._lend(0)
        return sum(losses) / len(losses)

    def _gradients(self, rank: int, loss_of: LossOf) -> float:
        self._lend(rank)
        for p in self._parameters[0]:
            p.grad = None
        loss = loss_of(rank)
        loss.backward()
        gradients = [p.grad for p in self._parameters[0]]
        self._lend(0)
        for p, gradient in zip(self._parameters[rank], gradients, strict=True):
            p.grad = gradient
        return loss.item()

    def _lend(self, rank: int) -> None:
        """Let the model compute with the weights of a rank."""
        for p, weights in zip(self._parameters[0], self._weights[rank], strict=True):
            p.data = weights
