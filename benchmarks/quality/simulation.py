"""N ranks in one process: one model, N exchanges of dgc_horovod's own, and no Horovod between them.

The ranks take turns: each computes the gradients of its shard and hands them to its own `GradientExchange`, the same
that ``DistributedOptimizer`` uses, with engine, packets and codecs. Where Horovod would carry the messages, they are
put on a board that all of them can read. A test compares it with real ranks, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.tasks import Task
from benchmarks.quality.variants import Variant
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.testing.loopback import Board, Loopback
from dgc_horovod.torch.gradients.collectives import ReduceSettings
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.local import LocalRounds
from dgc_horovod.torch.updates import States, update_of

LossOf = Callable[[int], Tensor]  # rank -> loss of its next batch


class _Exchange(GradientExchange):
    """The exchange of one rank."""

    def follow(self, finite: bool) -> None:
        """End a step as another rank has: all read the same."""
        self.take_second()
        self.close(finite)
        self._forget_step()


def _exchange(
    model: nn.Module, config: DGCConfig, rank: int, workers: int, board: Board, make: type[GradientExchange]
) -> Any:
    """The exchange of one of N ranks, whose messages are on a board."""
    transport, parameters = Loopback(rank, workers, board), dict(model.named_parameters())
    places = dict.fromkeys(parameters.values(), 0)
    return make(parameters, places, config, {ALL: transport}, ReduceSettings(averages=True), lambda: 1.0)


class DenseRanks:
    """Dense training: the update is the mean of all ranks' gradients.

    Args:
        model: which all ranks share.
        optimizer: on all of its parameters, not wrapped.
        workers: N.
        clip_norm: L2 norm to which the mean, or what has come out of the exchange, is clipped; or None.
    """

    exchange: OptimizerExchange | None = None  # of rank 0

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, clip_norm: float | None
    ) -> None:
        self.model, self.parameters, self.optimizer = model, dict(model.named_parameters()), optimizer
        self.workers, self.clip_norm = workers, clip_norm
        self.gradients: list[Tensor] = []  # of rank 0 in the last step

    def step(self, loss_of: LossOf) -> float:
        """One step of all ranks; the mean of their losses."""
        losses, gradients = [], []
        for rank in range(self.workers):
            losses.append(self._backward(loss_of(rank)))
            gradients.append([p.grad for p in self.parameters.values()])
        for p, of_ranks in zip(self.parameters.values(), zip(*gradients, strict=True), strict=True):
            p.grad = sum(of_ranks[1:], of_ranks[0]) / self.workers
        self.gradients = gradients[0]
        self._apply(self.optimizer.step)
        return sum(losses) / self.workers

    def _backward(self, loss: Tensor) -> float:
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item()

    def _apply(self, own_step: Callable[[], Any]) -> None:
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters.values(), self.clip_norm)
        own_step()


class CompressedRanks(DenseRanks):
    """Compressed training: what ``DistributedOptimizer`` does on each rank, in turn.

    Args:
        others: see `DenseRanks`.
        config: the compression.
        variant: what else is done otherwise than by the product. Of `node_size` workers, a divisor of N, one is the
            sender; the owners of shards, if `shard_density` is not 0, select anew what they send on.
        dense_clip_norm: the clip_norm of the dense steps before compression begins, as with the product's ``auto``.
    """

    def __init__(self, *others: Any, config: DGCConfig, variant: Variant, dense_clip_norm: float | None) -> None:
        super().__init__(*others)
        self._dense_left, self._compressed_clip_norm = variant.dense_steps, self.clip_norm
        if variant.dense_steps:
            self.clip_norm = dense_clip_norm
        self._variant, self._board, senders = variant, Board(), self.workers // variant.node_size
        self._updates = [update_of(self.optimizer, config) for _ in range(senders)]
        self._group = self.optimizer.param_groups[0]
        self.exchanges = [
            _exchange(self.model, config, rank, senders, self._board, _Exchange) for rank in range(senders)
        ]
        for update, exchange in zip(self._updates, self.exchanges, strict=True):  # each counts its own steps
            update.prepare(self.optimizer, exchange)
        self.exchange = self.exchanges[0]
        self._states: list[States] = []  # of every rank's optimizer, as the first compressed step finds it
        sparse = list(self.exchange.sparse)
        self._owners = Owners(sparse, variant.shard_density) if variant.shard_density else None

    def step(self, loss_of: LossOf) -> float:
        """One step of all ranks; the mean of their losses."""
        if self._dense_left:
            return self._dense_step(loss_of)
        losses, of_first = [], {}
        self._board.clear()
        self._set_masking()
        density = self.exchanges[0].density()
        if not self._states or self._updates[0].dense:
            self._states = [{p: dict(state) for p, state in self.optimizer.state.items()} for _ in self._updates]
        for sender, exchange in enumerate(self.exchanges):
            losses.append(self._backward(self._loss_of_node(sender, loss_of)))
            self._begin(sender)
            # as hooks do: the last parameter's gradient is there first
            results = {p: exchange.take(p) for p in reversed(self.parameters.values())}
            exchange.share_second()  # before any rank waits
            of_first = of_first or {p: (p.grad, result) for p, result in results.items()}
        for p, (grad, _) in of_first.items():
            p.grad = grad
        for p, (_, result) in of_first.items():
            p.grad = result()
        finite = self.exchanges[0].finish()
        for exchange in self.exchanges[1:]:  # what comes back is the same on every rank, and read once
            exchange.follow(finite)
        if self._variant.forgets:
            for exchange in self.exchanges:
                exchange.clear()
        if finite:
            if self._owners is not None:
                self._owners.reselect(density)
            exchange, own_step = self.exchanges[0], self.optimizer.step
            self._apply(lambda: self._updates[0].step(self.optimizer, exchange, own_step))
        for exchange in self.exchanges:  # no script clips
            exchange.clipping.step_ends()
        return sum(losses) / len(losses)

    def _dense_step(self, loss_of: LossOf) -> float:
        loss = super().step(loss_of)
        self._dense_left -= 1
        if not self._dense_left:
            self.clip_norm = self._compressed_clip_norm
            states = [{p: dict(state) for p, state in self.optimizer.state.items()} for _ in self._updates]
            for update, exchange, state in zip(self._updates, self.exchanges, states, strict=True):
                self.optimizer.state.update(state)  # each rank takes momentum over from a state of its own
                update.end_dense_steps(self.optimizer, exchange)
        return loss

    def _loss_of_node(self, node: int, loss_of: LossOf) -> Tensor:
        """The mean over the workers of a node, whose gradient is the mean of theirs."""
        workers = range(node * self._variant.node_size, (node + 1) * self._variant.node_size)
        losses = [loss_of(worker) for worker in workers]
        return sum(losses[1:], losses[0]) / self._variant.node_size

    def _set_masking(self) -> None:
        if self._variant.masks_below < 1:
            for exchange in self.exchanges:
                masks = exchange.density() <= self._variant.masks_below
                for engine in exchange.engines:
                    engine.config = exchange.config.replace(factor_masking=masks)

    def _begin(self, sender: int) -> None:
        exchange, update = self.exchanges[sender], self._updates[sender]
        exchange.begin_step(*update.entering(lambda p: self._group, self._states[sender], exchange))


class Owners:
    """The second half of a sharded exchange, as a trial: who owns a coordinate sends on the largest sums.

    ``r += mean_i(s_i);  s = Top_{k_out}(r);  r -= decoded(s)`` (DoubleSqueeze, arXiv 1905.05957). All shards are
    looked at together, as if each had its share of the largest: so it is for shards of thousands of elements.

    Args:
        parameters: on the sparse path.
        shard_density: k_out in k.
    """

    def __init__(self, parameters: list[Tensor], shard_density: float) -> None:
        self._parameters, self._shard_density = parameters, shard_density
        self.remainder = torch.zeros(sum(p.numel() for p in parameters))

    def reselect(self, density: float) -> None:
        """Replace the mean of what was sent by what the owners send on."""
        self.remainder += torch.cat([p.grad.reshape(-1) for p in self._parameters])
        k = min(self.remainder.numel(), max(1, round(self._shard_density * density * self.remainder.numel())))
        chosen = self.remainder.abs().topk(k, sorted=False).indices
        sent = torch.zeros_like(self.remainder)
        sent[chosen] = self.remainder[chosen].bfloat16().float()
        self.remainder -= sent
        for p, part in zip(self._parameters, sent.split([p.numel() for p in self._parameters]), strict=True):
            p.grad.copy_(part.view_as(p))


class LocalRanks:
    """The steps of ``Compression.local`` on each rank, in turn.

    A rank's own gradient is clipped to ``sqrt(N)`` times the norm of the averaged one.

    Args:
        task: whose model has the weights that all begin with; gradients are computed in it.
        variant: of which are the inner optimizers, and the dense steps before the first round.
        workers: N.
        config: the compression.
    """

    def __init__(self, task: Task, variant: Variant, workers: int, config: DGCConfig) -> None:
        self._task, self._board = task, Board()
        self._models = [task.model, *(copy.deepcopy(task.model) for _ in range(workers - 1))]
        self._parameters = [list(each.parameters()) for each in self._models]
        self._inner = [variant.make_optimizer(each, task.settings) for each in self._models]
        self._clip_norm, self._dense_left = task.settings.clip_norm, variant.dense_steps
        self._limit = None if self._clip_norm is None else self._clip_norm * math.sqrt(workers)
        self.optimizer: Any = SimpleNamespace(param_groups=[g for inner in self._inner for g in inner.param_groups])
        self._rounds = [
            LocalRounds(_exchange(each, config, rank, workers, self._board, GradientExchange), config)
            for rank, each in enumerate(self._models)
        ]
        self.exchange = self._rounds[0].exchange

    def step(self, loss_of: LossOf) -> float:
        """An inner step of all ranks, and the exchange where it is due; the mean of their losses."""
        if self._dense_left:
            return self._dense_step(loss_of)
        losses, is_full = [], False
        for rank, (rounds, inner) in enumerate(zip(self._rounds, self._inner, strict=True)):
            rounds.begin_step()
            losses.append(self._backward(rank, loss_of))
            if self._limit is not None:
                nn.utils.clip_grad_norm_(self._parameters[rank], self._limit)
            inner.step()
            is_full = rounds.end_step()
        if is_full:
            self._board.clear()
            for rounds in self._rounds:
                rounds.send()
                rounds.exchange.share_second()  # before any rank waits
            for rounds in self._rounds:
                rounds.receive()
        return sum(losses) / len(losses)

    def _dense_step(self, loss_of: LossOf) -> float:
        self._dense_left -= 1
        losses = [self._backward(rank, loss_of) for rank in range(len(self._inner))]
        gradients = [[p.grad for p in parameters] for parameters in self._parameters]
        means = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        for parameters, inner in zip(self._parameters, self._inner, strict=True):
            for p, mean in zip(parameters, means, strict=True):
                p.grad = mean.clone()
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, self._clip_norm)
            inner.step()
        return sum(losses) / len(losses)

    def _backward(self, rank: int, loss_of: LossOf) -> float:
        self._task.model = self._models[rank]
        self._inner[rank].zero_grad()
        loss = loss_of(rank)
        loss.backward()
        self._task.model = self._models[0]
        return loss.item()
