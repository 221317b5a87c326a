"""How the arithmetic of Adam and AdamW is split."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from dgc_horovod.core.second_moment import bounded
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation, AdamCorrection, ErrorFeedback
from dgc_horovod.notices import ADAM_DIRECTIONS, NEVER_LEARNT, NOT_LEARNT, tell_frozen, tell_unknown
from dgc_horovod.state.residual_state import FIRST, RESIDUAL, SECOND
from dgc_horovod.torch.gradients import moments
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates.base import Group, Left, Parameter, SplitUpdate, States, fill_state, step_count

_log = logging.getLogger("dgc_horovod")
_EMPTIED = (
    "optimizer.state was emptied after the dense steps of Adam: compressed tensors go on with their moments, as the "
    "second stays, and a checkpoint from now on lacks it. Let the script keep the state, or pass second_moment='own'"
)


class AdamUpdate(SplitUpdate):
    """Adam, AdamW: each rank's own Adam direction enters the residual; ``w -= lr*mean(s)`` after the exchange."""

    sends_directions = keeps_second = True

    def __init__(self, decoupled: bool) -> None:
        super().__init__("adam")
        self.notices = [ADAM_DIRECTIONS]
        self._adamw = decoupled
        self._steps: dict[Parameter, int] = {}

    def _decoupled(self, group: Group) -> bool:
        return self._adamw or bool(group.get("decoupled_weight_decay"))

    def accumulation(self, p: Parameter, group: Group) -> Accumulation:
        return self._correction(p, group)

    def _correction(self, p: Parameter, group: Group, frozen: bool = False) -> AdamCorrection:
        self._steps[p] = self._steps.get(p, 0) + 1
        b1, b2 = group["betas"]
        return AdamCorrection((float(b1), float(b2)), float(group["eps"]), self._steps[p], frozen)

    def decay_before(self, group: Group) -> float:
        return 0.0 if self._decoupled(group) else float(group["weight_decay"])

    def fading(self, group: Group) -> float:
        return float(group["betas"][0])

    def adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        if not self._was_placeholder(p, states, exchange):
            return
        state = states[p]
        if state.get("step"):  # else none, or the zeros of `prepare`: the engine has the moments
            self._steps[p] = int(state["step"])
            moments.load(exchange, p, first=_sign(group) * state["exp_avg"], second=state["exp_avg_sq"])
        state.clear()

    def forget(self) -> None:
        self._steps.clear()

    def directions(self, p: Parameter) -> int:
        return self._steps.get(p, 0)

    def set_directions(self, p: Parameter, count: int) -> None:
        self._steps[p] = count

    def resume(self, p: Parameter, state: dict[str, Any], directions: int) -> None:
        state.clear()
        self._steps[p] = directions

    def flush_one(self, p: Parameter, left: Left, group: Group, state: dict[str, Any], compressed: bool) -> Any:
        """All of v is applied, and the mean moments go where stock Adam has them.

        What coding has left of an uncompressed tensor is a gradient, which is not applied alone: Adam would take a
        full step for it, however small it is.
        """
        if not compressed:
            return left[RESIDUAL]
        p.add_(left[RESIDUAL].to(p.dtype), alpha=-_sign(group) * float(group["lr"]))
        if FIRST in left:
            step = step_count(p, group, self.directions(p))
            state.update(step=step, exp_avg=_sign(group) * left[FIRST], exp_avg_sq=left[SECOND])
        return None

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        lr = float(group["lr"])
        if self._decoupled(group) and group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        p.add_(update, alpha=lr if group["maximize"] else -lr)


class FrozenAdamUpdate(AdamUpdate):
    """Adam, AdamW with a second moment that is learnt in dense steps, the same on every rank, and then stays.

    ``first = b1*first + (1-b1)*g;  v += first / (sqrt(second) + eps)`` with each rank's own first moment, ``w -=
    lr*mean(s)`` after the exchange (1-bit Adam, arXiv 2102.02888, with DGC's residual). Dense steps are those of the
    user's optimizer. The second moment stays in the optimizer's state, the same on every rank, where checkpoints and
    broadcasts find it; the engine's is made from it.
    """

    keeps_second, learns_second = False, True

    def __init__(self, decoupled: bool) -> None:
        super().__init__(decoupled)
        self.notices, self._told, self._told_emptied = [], False, False
        self._share = 1  # of a sum over ranks, their number: what a first moment is divided by
        self._unknown: set[Parameter] = set()  # whose second moment nobody has learnt

    @property
    def sends_directions(self) -> bool:  # type: ignore[override]
        """Whether updates are steps already, and no gradients."""
        return not self.dense

    def accumulation(self, p: Parameter, group: Group) -> Accumulation:
        return ErrorFeedback() if self.dense else self._correction(p, group, frozen=True)

    def decay_before(self, group: Group) -> float:
        return 0.0 if self.dense else super().decay_before(group)

    def fading(self, group: Group) -> float:
        return 0.0 if self.dense else super().fading(group)

    @torch.no_grad()
    def adopt_state(self, p: Parameter, group: Group, states: States, exchange: GradientExchange) -> None:
        if self.dense:
            return
        if p not in states:
            self._tell_emptied(exchange)
        state, name, b2 = states[p], exchange.names[p], group["betas"][1]
        if moments.has_shared(exchange, p):
            state.pop("exp_avg", None)  # the zeros of `prepare`; or another worker of the node has it
            if p in self._unknown and p.grad is not None and bool(p.grad.any()):
                raise UnsupportedUse(NEVER_LEARNT.format(name=name))
            return
        step = int(state.get("step", 0))
        if not step and p.requires_grad and p not in self._unknown:
            raise UnsupportedUse(NOT_LEARNT)
        self._tell(exchange)
        learnt = state["exp_avg_sq"].float() / ((1 - b2**step) or 1)  # zeros of what was frozen all the time
        second = torch.from_numpy(bounded(learnt.cpu().numpy())).to(p.device)
        self._unknown.discard(p)
        if bool(second.isinf().all()):
            self._unknown.add(p)
            if exchange.collectives.rank == 0:
                tell_unknown(name)
        moments.share_second(exchange, p, second)
        first = state.pop("exp_avg", None)
        if not moments.is_begun(exchange, p):  # after dense steps, a flush, a stock checkpoint
            share = 1 if exchange.settings.averages else exchange.collectives.workers  # of a sum each rank has its part
            ours = None if first is None else _sign(group) / share * first
            moments.begin(exchange, p, ours, second.sqrt() + group["eps"])
        if (first is not None and first.any()) or not self._steps.get(p):
            self._steps[p] = step

    def _tell(self, exchange: GradientExchange) -> None:
        if not self._told and exchange.collectives.rank == 0:
            tell_frozen(exchange.buckets.steps)
        self._told = True

    def _tell_emptied(self, exchange: GradientExchange) -> None:
        if not self._told_emptied and exchange.collectives.rank == 0:
            _log.warning("dgc_horovod: %s", _EMPTIED)
        self._told_emptied = True

    def resume(self, p: Parameter, state: dict[str, Any], directions: int) -> None:
        state.pop("exp_avg", None)
        self._steps[p] = directions

    def check_flush(self, optimizer: Any) -> None:
        exchange = optimizer._dgc
        self._share = 1 if exchange.settings.averages else exchange.collectives.workers
        known = [p for p in exchange.compressed if p not in self._unknown]
        if any(moments.is_begun(exchange, p) and not optimizer.state[p].get("step") for p in known):
            raise UnsupportedUse(NOT_LEARNT)

    def flush_one(self, p: Parameter, left: Left, group: Group, state: dict[str, Any], compressed: bool) -> Any:
        """All of v is applied, and moments and step are what stock Adam would go on with.

        Without a first moment there were dense steps alone, and v is what coding has left of a gradient.
        """
        if not compressed or FIRST not in left:
            return left[RESIDUAL]
        p.add_(left[RESIDUAL].to(p.dtype), alpha=-_sign(group) * float(group["lr"]))
        b2, before, now = group["betas"][1], int(state["step"]), self.directions(p)
        if not before:  # frozen in all dense steps: stock Adam begins with it
            return None
        state["exp_avg"] = (_sign(group) * self._share * left[FIRST]).to(p.dtype)
        state["exp_avg_sq"].mul_((1 - b2**now) / (1 - b2**before))  # at another step the same moment
        state["step"].fill_(now)
        return None

    def step(self, optimizer: torch.optim.Optimizer, compressed: list[Parameter], own_step: Callable[[], Any]) -> None:
        if not self.dense:
            super().step(optimizer, compressed, own_step)
            return
        fill_state(optimizer, self.kind)  # where the first moment was taken over before, and steps are dense again
        own_step()


def _sign(group: Group) -> float:
    """Stock's first moment is of what is descended."""
    return -1.0 if group["maximize"] else 1.0
