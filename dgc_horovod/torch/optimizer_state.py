"""The state of a torch optimizer as stock has it, and momentum and residual where this rank's engine has them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from dgc_horovod.arithmetic import Arithmetic
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, SECOND
from dgc_horovod.torch.gradients.exchange import GradientExchange

Group = dict[str, Any]
Parameter = torch.Tensor
Optimizer = torch.optim.Optimizer
State = dict[str, Any]  # of a parameter
Made = list[tuple[Parameter, str, "weakref.ref[torch.Tensor]"]]  # parameter, key of its state, what was put there

SLOTS = {MOMENTUM: "momentum_buffer", FIRST: "exp_avg", SECOND: "exp_avg_sq"}  # keys of a state, by part of a record
STEP, _LARGEST = "step", "max_exp_avg_sq"  # other keys


def flat(x: torch.Tensor) -> np.ndarray:
    """`x` on the host, flat float32; perhaps in its own memory."""
    found: np.ndarray = x.detach().reshape(-1).float().cpu().numpy()
    return found


def put_slots(p: Parameter, group: Group, state: State, slots: Mapping[str, np.ndarray], steps: int | None) -> None:
    """Let the state of `p` have these slots, flat, by part, after so many steps of Adam (None: it counts none).

    In the memory format of `p`: fused optimizers walk both in memory order.
    """
    if steps is not None:
        state[STEP] = step_count(p, group, steps)
    for part, x in slots.items():
        state[SLOTS[part]] = torch.empty_like(p).copy_(torch.from_numpy(x).view(p.shape))


def step_count(p: Parameter, group: Group, steps: int = 0) -> torch.Tensor:
    """Adam's ``step`` as stock has it: on the device where kernels read it there."""
    on_device = group.get("capturable") or group.get("fused")
    # not of the default dtype, as in stock: in bfloat16 256 + 1 is 256
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32
    return torch.full((), float(steps), dtype=dtype, device=p.device if on_device else None)


def fill_state(optimizer: Optimizer, stock: Arithmetic, known: Collection[Parameter]) -> Made:
    """Fill the state of SGD, Adam and AdamW with the zeros that they would start from.

    With an empty state Horovod's ``broadcast_optimizer_state`` takes a real step; and where one rank alone
    has loaded a checkpoint, the ranks would broadcast different entries and never meet. An entry with nothing in it
    goes: ranks outside the optimizer's process set, which call that function too, have none.

    Args:
        optimizer, stock: optimizer, and the arithmetic of it.
        known: parameters that are exchanged; one of them may have been frozen since.

    Returns:
        The zeros of slots that were made, for `refit_state`.
    """
    made: Made = []
    groups = optimizer.param_groups if stock.slots else []
    # the first buffer of SGD with dampening is the gradient itself, not a part of it: its state stays as it comes
    dampens = any(group.get("momentum") and group.get("dampening") for group in groups)
    for group in groups if not dampens else []:
        for p in group["params"]:
            if not p.requires_grad and p not in known:
                continue
            state = optimizer.state.get(p, {})
            for key in _entries(stock, group):
                if state.get(key) is None:
                    state[key] = step_count(p, group) if key == STEP else torch.zeros_like(p)
                    if key != STEP:
                        made.append((p, key, weakref.ref(state[key])))
            if state:
                optimizer.state[p] = state
            else:
                optimizer.state.pop(p, None)
    return made


def _entries(stock: Arithmetic, group: Group) -> list[str]:
    """What stock has of a tensor, in its order: it is broadcast in that."""
    keys = [SLOTS[part] for part in stock.slots if part != MOMENTUM or group["momentum"]]
    if SECOND in stock.slots:
        return [STEP, *keys, *([_LARGEST] if group["amsgrad"] else [])]
    return keys


def refit_state(optimizer: Optimizer, made: Made) -> None:
    """Let zeros that `fill_state` made follow their parameters: a script has moved or cast the model since.

    All others stay as they are: an optimizer may keep moments in fp32 for weights in half precision.
    """
    for p, key, reference in made:
        state, x = optimizer.state.get(p, {}), reference()
        if x is None or state.get(key) is not x:
            continue
        if (x.dtype != p.dtype or x.device != p.device) and not x.any():
            state[key] = torch.zeros_like(p)


def drop_momentum(exchange: GradientExchange, p: Parameter) -> None:
    """Empty what this rank keeps of the momentum of `p`; what waits to be sent stays."""
    if exchange.names[p] in exchange.place:
        engine, i = exchange.place[exchange.names[p]]
        engine.state.write(i, {part: x for part, x in engine.state.read(i).items() if part != MOMENTUM})


def add_residual(exchange: GradientExchange, p: Parameter, residual: torch.Tensor) -> None:
    """Add to what this rank keeps of v of `p`."""
    if exchange.names[p] in exchange.place:
        engine, i = exchange.place[exchange.names[p]]
        segment = engine.bucket.segments[i]
        ours = torch.as_tensor(engine.state.v[segment.place])
        ours.add_(residual.detach().reshape(-1)[segment.offset :][: segment.numel].float().to(ours.device))


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
            if isinstance(state.get(STEP), int):
                state[STEP] = 0


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
