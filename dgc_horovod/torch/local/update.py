"""What stays with each rank under local steps: the inner optimizer and its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, Arrays, ResidualState
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates.base import AllLeft, Kept, Optimizer, OwnStep, Parameter, PlainUpdate, step_count

# entries of an inner optimizer's state that go into a rank's record, by the kind of the optimizer
_KEPT = {"sgd": {"momentum_buffer": MOMENTUM}, "adam": {"exp_avg": FIRST, "exp_avg_sq": SECOND}}
_Own = tuple[Arrays, int | None]  # by key of the state, and Adam's steps


class LocalUpdate(PlainUpdate):
    """The inner optimizer takes its own gradients.

    Args:
        kind: see `PlainUpdate`; the state of "sgd" and "adam" is kept of every rank, of others that of the first.
        rate: outer learning rate, > 0.
    """

    def __init__(self, kind: str, rate: float) -> None:
        super().__init__(kind)
        self.notices, self._rate = [], rate

    def add_own(self, optimizer: Optimizer, exchange: GradientExchange, state: ResidualState) -> None:
        for p, name in exchange.names.items():
            own = optimizer.state.get(p, {})
            kept = {part: own.get(key) for key, part in _KEPT.get(self.kind, {}).items()}
            if not all(bool(torch.isfinite(x).all()) for x in kept.values() if x is not None):
                continue  # no file takes others
            for part, x in kept.items():
                if x is not None:
                    state.tensors.setdefault(name, {})[part] = x.detach().reshape(-1).float().cpu().numpy().copy()
            if "step" in own and name in state.tensors:
                state.directions[name] = int(own["step"])

    def split_own(
        self, exchange: GradientExchange, state: ResidualState
    ) -> tuple[ResidualState, dict[Parameter, _Own]]:
        keys, found, tensors = _KEPT.get(self.kind, {}), {}, {}
        of_name = {name: p for p, name in exchange.names.items()}
        for name, arrays in state.tensors.items():
            own = {key: arrays[part] for key, part in keys.items() if part in arrays}
            if name in of_name and own:
                p = of_name[name]
                if any(x.size != p.numel() for x in own.values()):
                    sizes = sorted({x.size for x in own.values()})
                    raise CheckpointError(
                        f"the optimizer's state of {name!r} has {sizes} elements, the model's tensor has {p.numel()}; "
                        "they must be of the same model"
                    )
                found[p] = own, state.directions.get(name)
            kept = {part: x for part, x in arrays.items() if part not in keys.values()}
            if kept:
                tensors[name] = kept
        return dataclasses.replace(state, tensors=tensors, directions={}), found

    @torch.no_grad()
    def take_own(self, optimizer: Optimizer, own: dict[Parameter, _Own]) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                arrays, steps = own.get(p, ({}, None))
                for key, x in arrays.items():  # in the memory format of p: fused optimizers walk both in memory order
                    optimizer.state[p][key] = torch.empty_like(p).copy_(torch.from_numpy(x).view(p.shape))
                if steps is not None:
                    optimizer.state[p]["step"] = step_count(p, group, steps)

    @torch.no_grad()
    def flush(self, optimizer: Optimizer, exchange: GradientExchange, left: AllLeft, own_step: OwnStep) -> Kept:
        """Apply what all ranks together had kept: it is a change of weights, of which nothing is left."""
        for p, parts in left.items():
            if RESIDUAL in parts:
                p.sub_(parts[RESIDUAL].to(p.dtype).mul(self._rate))  # not fused: see `LocalRounds.receive`
        return {}


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one parameter's state."""
    return {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in state.items()}


def clean(states: Mapping[Any, dict[str, Any]]) -> None:
    """Empty what is not finite of an inner optimizer's state: it would spoil the weights again.

    Of a parameter all of it: Adam's first moment is no good without the second, nor are its steps, by which empty
    moments would count as full ones.
    """
    for state in states.values():
        own = [x for x in state.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not all(bool(torch.isfinite(x).all()) for x in own):
            for x in own:
                x.zero_()
            if isinstance(state.get("step"), int):
                state["step"] = 0


def unscale(optimizer: Optimizer) -> bool | None:
    """Do with gradients what a GradScaler asks for that calls ``step``; whether the step may be, None: nobody asks."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and float(found):
        return False
    if scale is not None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad.div_(scale.to(p.grad.device))
    if found is None:
        return None
    for name in ("grad_scale", "found_inf"):  # for an optimizer that would unscale by itself
        setattr(optimizer, name, None)
    return True
