"""How the arithmetic of Adam and AdamW is split."""

from __future__ import annotations

from typing import Any

import torch

from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback
from dgc_horovod.notices import ADAM_DIRECTIONS
from dgc_horovod.state.residual_state import RESIDUAL
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates.base import (
    AllLeft,
    Group,
    Kept,
    Optimizer,
    OwnStep,
    Parameter,
    SplitUpdate,
    States,
    fill_state,
    step_count,
)


class AdamUpdate(SplitUpdate):
    """Adam, AdamW: ``v += g / den`` with a second moment that all ranks share, ``w -= lr*mean(s)`` after the exchange.

    See `SecondMoments` for ``den``. The first moment is left out, beta1 = 0: what waits in v is delayed, and so has
    momentum. A step at which everything is sent is the user's optimizer's own; where such steps come first, or a stock
    checkpoint, the shared second moment begins with theirs, and what their first moment still holds of each gradient,
    ``b1/(1-b1) * m``, enters v.
    """

    dense_is_stock = True

    def __init__(self, decoupled: bool) -> None:
        super().__init__("adam")
        self.notices = [ADAM_DIRECTIONS]
        self._adamw = decoupled

    @property
    def sends_directions(self) -> bool:  # type: ignore[override]
        """Whether updates are steps already, and no gradients."""
        return not self.dense

    def _decoupled(self, group: Group) -> bool:
        return self._adamw or bool(group.get("decoupled_weight_decay"))

    def accumulation(self, p: Parameter, group: Group, exchange: GradientExchange) -> Accumulation:
        if self.dense:
            return ErrorFeedback()
        return exchange.adam.feed(exchange.names[p], float(group["betas"][1]), float(group["eps"]))

    def decay_before(self, group: Group) -> float:
        return 0.0 if self.dense or self._decoupled(group) else float(group["weight_decay"])

    @torch.no_grad()
    def prepare(self, optimizer: Optimizer, exchange: GradientExchange) -> None:
        """As for others; the second moment is there as stock Adam has it, and the first is zero."""
        for group in optimizer.param_groups:
            for p in self._taken.intersection(group["params"]):
                if p in optimizer.state and exchange.second[exchange.names[p]].known:
                    optimizer.state[p].update(self._stock_state(p, group, exchange))
        super().prepare(optimizer, exchange)

    def _stock_state(self, p: Parameter, group: Group, exchange: GradientExchange) -> dict[str, torch.Tensor]:
        moment = exchange.second[exchange.names[p]]
        square = torch.from_numpy(moment.square()).view(p.shape) * (1 - float(group["betas"][1]) ** moment.steps)
        return {
            "step": step_count(p, group, moment.steps),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p).copy_(square),
        }

    @torch.no_grad()
    def adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        if self.dense or not self._was_placeholder(p, states, exchange):
            return
        state, name, (b1, b2) = states[p], exchange.names[p], map(float, group["betas"])
        steps = int(state.get("step", 0))
        if steps and not exchange.second[name].known:
            share = 1 if exchange.settings.averages else exchange.collectives.workers  # each has its part of a sum
            rest = b1 / (1 - b1) / share * _sign(group) * state["exp_avg"]
            square = state["exp_avg_sq"].float() / (1 - b2**steps)
            flat = [x.detach().reshape(-1).float().cpu().numpy() for x in (square, rest)]
            exchange.adam.take(name, flat[0], flat[1], steps, b2, float(group["eps"]))
        state.clear()

    def _follow_emptied(self, p: Parameter, states: States, exchange: GradientExchange) -> None:
        if p not in states:
            exchange.second.forget(exchange.names[p])
        super()._follow_emptied(p, states, exchange)

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        lr = float(group["lr"])
        if self._decoupled(group) and group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        p.add_(update, alpha=lr if group["maximize"] else -lr)

    @torch.no_grad()
    def flush(self, optimizer: Optimizer, exchange: GradientExchange, left: AllLeft, own_step: OwnStep) -> Kept:
        """All of v is applied, and stock Adam can go on with the second moment.

        A gradient that waits, what coding has left of one that was sent whole, is not applied: Adam would take a full
        step for it, however small it is.
        """
        kept = {}
        for p, group in ((p, each) for each in optimizer.param_groups for p in each["params"] if p in left):
            if p not in exchange.sparse or not exchange.second[exchange.names[p]].known:
                kept[p] = left[p][RESIDUAL]
                continue
            p.add_(left[p][RESIDUAL].to(p.dtype), alpha=-_sign(group) * float(group["lr"]))
            optimizer.state[p] = self._stock_state(p, group, exchange)
        exchange.second.clear()
        return kept

    def step(self, optimizer: Optimizer, exchange: GradientExchange, own_step: OwnStep) -> None:
        if not self.dense:
            super().step(optimizer, exchange, own_step)
            return
        fill_state(optimizer, self.kind, exchange.names)
        own_step()


def _sign(group: Group) -> float:
    """Stock's first moment is of what is descended."""
    return -1.0 if group["maximize"] else 1.0
