"""Access to the state of a torch optimizer in stock's form, and to momentum and residual in this rank's engine."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from dgc_horovod.arithmetic import Arithmetic
from dgc_horovod.kernels.contract import Array
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, SECOND
from dgc_horovod.torch.gradients.collectives import Parameter
from dgc_horovod.torch.gradients.exchange import GradientExchange

Group = dict[str, Any]
State = dict[str, Any]  # of a parameter
Made = list[tuple[Parameter, str, "weakref.ref[torch.Tensor]"]]  # parameter, key in its state, the tensor made for it

SLOTS = {MOMENTUM: "momentum_buffer", FIRST: "exp_avg", SECOND: "exp_avg_sq"}  # keys of a state, by part of a record
STEP, _LARGEST = "step", "max_exp_avg_sq"  # other keys


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, such as learning rates."""
    return [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]


def flat(x: torch.Tensor) -> np.ndarray:
    """Return `x` on the host, flat float32; it may share the memory of `x`."""
    return x.detach().reshape(-1).float().cpu().numpy()


def put_slots(p: Parameter, group: Group, state: State, slots: Mapping[str, Array], steps: int | None) -> None:
    """Set slots of the state of `p` from arrays or tensors by part, and Adam's step count (None: there is none).

    Slots get the memory format of `p`, as fused optimizers read both in memory order.
    """
    if steps is not None:
        state[STEP] = step_count(p, group, steps)
    for part, x in slots.items():
        state[SLOTS[part]] = torch.empty_like(p).copy_(torch.as_tensor(x).reshape(p.shape))


def step_count(p: Parameter, group: Group, steps: int = 0) -> torch.Tensor:
    """Return Adam's ``step`` in stock's form; on the device if fused or capturable."""
    on_device = group.get("capturable") or group.get("fused")
    # as in stock, not of the default dtype: in bfloat16 256 + 1 is 256
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group.get("fused") else torch.float32
    return torch.full((), float(steps), dtype=dtype, device=p.device if on_device else None)


def fill_state(optimizer: Optimizer, stock: Arithmetic, known: Collection[Parameter]) -> Made:
    """Fill the state of SGD, Adam and AdamW with their initial zeros.

    With an empty state Horovod's ``broadcast_optimizer_state`` makes a real step; and if only one rank has loaded a
    checkpoint, the ranks would broadcast different entries, which never match. Empty entries are removed: ranks outside
    the optimizer's process set, which call that function too, have none.

    Args:
        optimizer, stock: optimizer, and its arithmetic.
        known: exchanged parameters, some of which may be frozen now.

    Returns:
        The slots that were made, for `Update.begin`.
    """
    made: Made = []
    groups = optimizer.param_groups if stock.slots else []
    # the first buffer of SGD with dampening is the undamped gradient: its state must be empty before the first step
    dampens = any(group.get("momentum") and group.get("dampening") for group in groups)
    for group in groups if not dampens else []:
        # in stock's order, in which entries are broadcast
        keys = [SLOTS[part] for part in stock.slots if part != MOMENTUM or group["momentum"]]
        if SECOND in stock.slots:
            keys = [STEP, *keys, *([_LARGEST] if group["amsgrad"] else [])]
        for p in group["params"]:
            if not p.requires_grad and p not in known:
                continue
            state = optimizer.state.get(p, {})
            for key in keys:
                if state.get(key) is None:
                    state[key] = step_count(p, group) if key == STEP else torch.zeros_like(p)
                    if key != STEP:
                        made.append((p, key, weakref.ref(state[key])))
            if state:
                optimizer.state[p] = state
            else:
                optimizer.state.pop(p, None)
    return made


def add_residual(exchange: GradientExchange, p: Parameter, residual: torch.Tensor) -> None:
    """Add to this rank's residual v of `p`."""
    if exchange.names[p] in exchange.place:
        engine, i = exchange.place[exchange.names[p]]
        segment = engine.bucket.segments[i]
        ours = torch.as_tensor(engine.state.v[segment.place])
        ours.add_(residual.detach().reshape(-1)[segment.offset :][: segment.numel].float().to(ours.device))


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy one parameter's state."""
    return {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in state.items()}


def clean(states: Mapping[Any, dict[str, Any]]) -> None:
    """Reset the state of parameters that is not finite in an inner optimizer; it would spoil the weights again.

    The whole state of a parameter is reset: Adam's first moment needs the second, and with its old step count zero
    moments would not be bias-corrected.
    """
    for state in states.values():
        own = [x for x in state.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not all(bool(torch.isfinite(x).all()) for x in own):
            for x in own:
                x.zero_()
            if isinstance(state.get(STEP), int):
                state[STEP] = 0


def unscale(optimizer: Optimizer) -> bool | None:
    """Unscale gradients for a GradScaler that calls ``step``; return whether the step may be made, None without one."""
    found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found is not None and float(found):
        return False
    if scale is not None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad.div_(scale.to(p.grad.device))
    if found is None:
        return None
    for name in ("grad_scale", "found_inf"):  # else an optimizer that unscales itself would unscale again
        setattr(optimizer, name, None)
    return True
