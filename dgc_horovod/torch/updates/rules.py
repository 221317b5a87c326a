"""How an optimizer's arithmetic is split: what enters the residual before the exchange, what is applied after.

The exchange brings ``mean(s)`` into ``p.grad``. For plain error feedback the user's optimizer takes it as
a gradient. For SGD with momentum the momentum has already been applied, locally: what is left of the
optimizer for that tensor is linear in the weights (decay) and is applied here, beside ``mean(s)``. For
Adam the direction has been formed locally, and what is left is the plain step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation, AdamCorrection, ErrorFeedback, MomentumCorrection
from dgc_horovod.notices import ADAM_AFTER, ADAM_DIRECTIONS, refusal
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND

Group = dict[str, Any]
Parameter = torch.Tensor
Left = Mapping[str, torch.Tensor]  # of a tensor, by part
Compressed = Callable[[Parameter], bool]
States = Mapping[Parameter, dict[str, Any]]  # of an optimizer
_momentum_feed = functools.lru_cache(maxsize=16)(MomentumCorrection)  # one for all tensors of a group


class PlainUpdate:
    """Error feedback alone: the gradient enters the residual, the user's optimizer takes what comes back.

    Args:
        kind: name of the user's optimizer's arithmetic: "sgd", "adam" (AdamW too) or "other".
    """

    sends_directions = False  # whether updates are steps already, and no gradients

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.notice = ADAM_AFTER if kind == "adam" else ""  # for the user, once

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer's state have what stock's has, on every rank: zeros where the engine keeps the real thing.

        Called after wrapping, after loading a state, and whenever somebody asks for it.
        """
        fill_state(optimizer, self.kind)

    def accumulation(self, p: Parameter, group: Group) -> Accumulation:
        """How this step's gradient of `p` enters the residual."""
        return ErrorFeedback()

    def decay_before(self, group: Group) -> float:
        """Weight decay that belongs to the gradient itself, added before everything else."""
        return 0.0

    def fading(self, group: Group) -> float:
        """The factor, in [0, 1), by which the engine's momentum falls in a step without a gradient."""
        return 0.0

    def step(self, optimizer: torch.optim.Optimizer, compressed: list[Parameter], own_step: Callable[[], Any]) -> None:
        """Apply one exchanged step: `own_step` runs the user's optimizer on every ``p.grad`` there is."""
        own_step()

    def adopt_state(self, p: Parameter, group: Group, states: States) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Moments found in the optimizer's state (a stock checkpoint) that the engine takes over."""
        return None

    def directions(self, p: Parameter) -> int:
        """Steps of which the engine's moments of `p` are made, if it has any."""
        return 0

    def set_directions(self, p: Parameter, count: int) -> None:
        """Let it be `count` of them."""

    def resume(self, p: Parameter, state: dict[str, Any], directions: int) -> None:
        """The engine has loaded moments of `p`: what stands in the optimizer's `state` is not to be taken over."""

    @torch.no_grad()
    def flush(self, optimizer: Any, left: Mapping[Parameter, Left], is_compressed: Compressed) -> dict[Parameter, Any]:
        """Apply what all ranks together had kept; here as one step of the user's optimizer with it as gradient.

        Args:
            optimizer: wrapped torch optimizer.
            left: combined u, v or moments of every tensor in a bucket, by part.
            is_compressed: function that tells whether a tensor is on the sparse path.

        Returns:
            What cannot be applied, by parameter, and is to be kept on every rank.
        """
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = left[p][RESIDUAL].to(p.dtype) if p in left else None
        optimizer._dgc_own_step()
        return {}


class _SplitUpdate(PlainUpdate):
    """The user's optimizer steps the dense-path tensors only; compressed ones are applied by `apply`."""

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        super().prepare(optimizer)
        self._placeholders = {p for group in optimizer.param_groups for p in group["params"]}

    def _was_placeholder(self, p: Parameter) -> bool:
        """Whether the state of `p` has not been looked at since `prepare`."""
        try:
            self._placeholders.remove(p)
        except KeyError:
            return False
        return True

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def flush_one(self, p: Parameter, left: Left, group: Group, state: dict[str, Any], compressed: bool) -> Any:
        """Apply what is left of `p`; returns what cannot be applied, or None."""
        raise NotImplementedError

    @torch.no_grad()
    def flush(self, optimizer: Any, left: Mapping[Parameter, Left], is_compressed: Compressed) -> dict[Parameter, Any]:
        kept = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in left:
                    kept[p] = self.flush_one(p, left[p], group, optimizer.state[p], is_compressed(p))
        return {p: v for p, v in kept.items() if v is not None}

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, compressed: list[Parameter], own_step: Callable[[], Any]) -> None:
        held = {p: p.grad for p in compressed}
        for p in compressed:
            p.grad = None
        try:
            own_step()
        finally:
            for p, grad in held.items():
                p.grad = grad
        for group in optimizer.param_groups:
            for p in group["params"]:
                update = held.get(p)
                if update is not None:
                    self.apply(p, update, group, optimizer.state[p])


class SGDUpdate(_SplitUpdate):
    """SGD: the engine's u carries the local gradient, ``momentum_buffer`` b what is the same on every rank.

    ``b = m*b + wd*w;  w -= lr*(b + mean(s))``, with Nesterov ``w -= lr*(wd*w + m*b + mean(s))``. By
    linearity u and b together are the stock buffer, so a stock checkpoint's buffer loads into b exactly.
    """

    def adopt_state(self, p: Parameter, group: Group, states: States) -> None:
        """Lets go of the zeros of `prepare` before u takes up memory: without decay b would stay zero."""
        if not self._was_placeholder(p):
            return
        state = states[p]
        buffer = state.get("momentum_buffer")
        if not group["weight_decay"] and buffer is not None and not buffer.any():
            state["momentum_buffer"] = None

    def accumulation(self, p: Parameter, group: Group) -> Accumulation:
        if group["momentum"] and group["dampening"]:
            raise UnsupportedUse(refusal("SGD's dampening", "dampening=0"))
        return _momentum_feed(float(group["momentum"]), bool(group["nesterov"]))

    def fading(self, group: Group) -> float:
        return float(group["momentum"])

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        lr = float(group["lr"])
        shared = self._shared_part(p, group, state)
        p.add_(update, alpha=lr if group["maximize"] else -lr)
        if shared is not None:
            p.add_(shared, alpha=-lr)

    def flush_one(self, p: Parameter, left: Left, group: Group, state: dict[str, Any], compressed: bool) -> None:
        """All of v is applied, and u joins the buffer: by linearity nothing is lost, and the buffer is stock's.

        Of an uncompressed tensor v is a gradient, whose momentum is still to come.
        """
        sign = -1.0 if group["maximize"] else 1.0  # stock's buffer is of what is descended
        lr, m, v = float(group["lr"]), float(group["momentum"]), sign * left[RESIDUAL].to(p.dtype)
        later = sign * left[MOMENTUM].to(p.dtype) if compressed and MOMENTUM in left else None if compressed else v
        if m and later is not None:
            buffer = state.get("momentum_buffer")
            state["momentum_buffer"] = later.clone() if buffer is None else buffer.add_(later)
        ahead = 1 + m if group["nesterov"] and not compressed else 1.0
        p.add_(v, alpha=-ahead * lr)

    def _shared_part(self, p: Parameter, group: Group, state: dict[str, Any]) -> torch.Tensor | None:
        """What stock SGD would apply for a zero gradient: decay and its momentum. Advances b."""
        m, decay = float(group["momentum"]), float(group["weight_decay"])
        buffer = state.get("momentum_buffer") if m else None
        if decay and m and buffer is None:
            buffer = state["momentum_buffer"] = torch.zeros_like(p)
        pull = p * decay if decay else None
        if buffer is None:
            return pull
        buffer.mul_(m)
        if pull is not None:
            buffer.add_(pull)
        if not group["nesterov"]:
            return buffer
        ahead = buffer * m
        return ahead if pull is None else ahead.add_(pull)


class AdamUpdate(_SplitUpdate):
    """Adam, AdamW: each rank's own Adam direction enters the residual; ``w -= lr*mean(s)`` after the exchange."""

    sends_directions = True

    def __init__(self, decoupled: bool) -> None:
        super().__init__("adam")
        self.notice = ADAM_DIRECTIONS
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

    def adopt_state(self, p: Parameter, group: Group, states: States) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._was_placeholder(p):
            return None
        state = states[p]
        if not state.get("step"):  # none, or the zeros of `prepare`: the engine has the moments
            state.clear()
            return None
        self._steps[p] = int(state["step"])
        sign = -1.0 if group["maximize"] else 1.0  # stock's moments are of what is descended
        moments = sign * state["exp_avg"], state["exp_avg_sq"]
        state.clear()
        return moments

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
        sign = -1.0 if group["maximize"] else 1.0
        p.add_(left[RESIDUAL].to(p.dtype), alpha=-sign * float(group["lr"]))
        if FIRST in left:
            step = torch.tensor(float(self.directions(p)))
            state.update(step=step, exp_avg=sign * left[FIRST], exp_avg_sq=left[SECOND])
        return None

    def apply(self, p: Parameter, update: torch.Tensor, group: Group, state: dict[str, Any]) -> None:
        lr = float(group["lr"])
        if self._decoupled(group) and group["weight_decay"]:
            p.mul_(1 - lr * group["weight_decay"])
        p.add_(update, alpha=lr if group["maximize"] else -lr)


def fill_state(optimizer: torch.optim.Optimizer, kind: str) -> None:
    """Fill the state of SGD, Adam and AdamW with the zeros that they would start from.

    With an empty state Horovod's ``broadcast_optimizer_state`` takes a real step; and where one rank alone
    has loaded a checkpoint, the ranks would broadcast different entries and never meet.
    """
    sgd, adam = kind == "sgd", kind == "adam"
    known = set(getattr(optimizer, "_dgc_parameters", {}).values())  # one of them may have been frozen since
    for group in optimizer.param_groups if sgd or adam else []:
        for p in group["params"]:
            if not p.requires_grad and p not in known:
                continue
            state = optimizer.state[p]
            if sgd and group["momentum"] and not group["dampening"] and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
            elif adam and not group["amsgrad"] and not state:
                on_device = group.get("capturable") or group.get("fused")
                state["step"] = torch.zeros((), device=p.device if on_device else None)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
