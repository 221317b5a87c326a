"""Steps that reach an optimizer in other ways than by its own ``step``, and notices to a script."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import CellType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from dgc_horovod.errors import UnsupportedUse

if TYPE_CHECKING:
    from dgc_horovod.torch.session.session import Session


LATE_CHANGE = (
    "p.grad was changed between backward() and synchronize(), when it had been taken already; the change has no "
    "effect. To clip, pass clip_norm=c to the compression (dgcrun: --dgc-clip-norm c)"
)
UNSCALED_TOO_EARLY = (
    "GradScaler.unscale_ or step() ran before the gradients were synchronized. Call optimizer.synchronize() before "
    "scaler.unscale_(optimizer) and scaler.step(optimizer), the latter inside `with optimizer.skip_synchronize():`"
)
SCALER_NOT_PASSED = (
    "a GradScaler drives this optimizer, which does not know its scale, so residuals of different scales would be "
    "added up; pass grad_scaler=scaler to DistributedOptimizer"
)
SCALER_LEFT_OUT = (
    "step() without the GradScaler that was passed as grad_scaler: gradients would be divided by its scale, which they "
    "do not have. Call scaler.step(optimizer); to go on without it, scale every loss by one that is not enabled"
)
CHANGED_UPDATE = (
    "the script changed p.grad between synchronize() and step(), by other means than clip_grad_norm_ and "
    "clip_grad_value_ of torch.nn.utils. After compression it is an update that arrives in bursts, and what is clipped "
    "off it is lost. To clip, pass clip_norm=c to the compression (dgcrun: --dgc-clip-norm c), or call "
    "clip_grad_norm_, and take the script's own clipping away"
)
TAKEN_AWAY = (
    "the script has set the gradient of {name!r} to None between backward() and step(): its update is left out, and "
    "what waits of it and its momentum are dropped, else they would come in a burst later on"
)
DROPPED = (
    "zero_grad() has dropped an update that was not applied. Its gradients have entered the momentum, and a "
    "part of them comes with later updates. To keep gradients that are too large out, limit them before they are "
    "exchanged (clip_norm=c); keep a backward pass that is not this model's away from it (detach(), or "
    "requires_grad_(False) meanwhile)"
)
ADDED_TO_UPDATE = (
    "backward() was called between synchronize() and step(): its gradient was added to an update, which has been "
    "through the exchange and the momentum, and would go through them once more. Sum all backward passes of a step "
    "before they are exchanged (backward_passes_per_step), or call step() after each; to give the update up, call "
    "optimizer.zero_grad() before backward()"
)
SUPERSEDED = (
    "parameters of this DistributedOptimizer have been wrapped by another one since, which has their gradients now; "
    "step that one. Two optimizers over one model: give each its own parameters, or step them both inside one torch "
    "optimizer with two parameter groups"
)
STEPPED_TWICE = (
    "step() was called again with no backward pass and no zero_grad() since the last one; p.grad still holds the "
    "update that has been applied. Call backward() first"
)
STEPPED_INSIDE = (
    "{outer} was given to register() or DistributedOptimizer(), and {inner}, which it has as .{name}, was stepped "
    "outside of {outer}.step(). Checks for gradients that are not finite and for equal replicas, and local steps, are "
    "part of step(), and were left out. Give it optimizer.{name} instead; with Horovod, put what is returned back there"
)
STEPPED_OTHERWISE = (
    "{optimizer} has applied an update without step() (its other methods: {methods}), or the script has written to all "
    "weights. Checks for gradients that are not finite and for equal replicas are part of step(), and were left out. "
    "Call step(), or use an optimizer whose step() makes the update. A script that drops the update, and writes to "
    "weights (clamp_, load_state_dict), calls optimizer.zero_grad() between the two"
)
LATE_HOOK = (
    "register_post_accumulate_grad_hook() was called after the optimizer had been wrapped: that hook runs when the "
    "exchange may have taken the gradient, and what it changes may take no part. Register it before wrapping"
)
ADDED_LATER = (
    "a parameter of shape {shape} was added to the torch optimizer after it had been wrapped: the ranks have already "
    "agreed on names and buckets. Add the group first, then wrap"
)
LEFT_OUT = (
    "optimizer.state_dict() holds no residuals: gradients that are not applied yet are lost where training resumes "
    "from it. Use save_checkpoint(), keep optimizer.residual_state_dict() of every rank beside it, or call "
    "optimizer.flush() on every rank before it"
)
LOADED_TWICE = (
    "a second load_state_dict() without a step after the first has emptied what load_checkpoint() had brought of u and "
    "v. accelerator.prepare(optimizer) does so: call load_checkpoint() after it"
)
SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The second "
    "synchronization does nothing; put step() inside `with optimizer.skip_synchronize():`"
)


def clipping_learned(limit: float, elements: bool = False) -> str:
    """What is said of a script that clips by itself, once it is done locally instead."""
    return (
        f"the script clips {'the elements of ' if elements else ''}gradients to {limit:g}. From the next step on each "
        f"rank clips its own gradient, to sqrt(N)*{limit:g}, before it enters the momentum (DGC 3.1), and the script's "
        "clipping of what comes back is left out. clip_norm=c, or --dgc-clip-norm c with dgcrun, sets another norm"
    )


def clipping_left_out(limit: float, given: float) -> str:
    """What is said of a script that clips to another norm than it was given."""
    return (
        f"the script clips gradients to {limit:g}; clip_norm={given:g} holds instead, for each rank's own gradient, "
        "and the script's clipping is left out"
    )


def is_trial(session: Session) -> bool:
    """Whether this step only fills the state: ``torch.distributed.checkpoint`` makes it before the first real one.

    Its learning rates and gradients are zeros, and it may be one rank's alone: nothing may be exchanged in it.
    """
    optimizer = session.optimizer
    if optimizer.state or session.passes.results or session.passes.synchronized:
        return False
    groups = optimizer.param_groups
    if any(group.get("lr", 0) for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    if any(session.watch.has_applied(grad) for grad in grads):  # the script's own, which it has zeroed in place
        return False
    return all(grad is not None and not grad.is_sparse and not grad.any() for grad in grads)


def watch_inside(outer: torch.optim.Optimizer) -> None:
    """From now on an optimizer inside `outer`, as a wrapper has one, may step within the ``step`` of `outer` alone.

    Wrappers with other methods (SAM's ``second_step``) would leave out everything that our ``step`` does.
    """
    own = {p for group in outer.param_groups for p in group["params"]}
    for name, inner in vars(outer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not outer:
            if not own.isdisjoint(p for group in inner.param_groups for p in group["params"]):
                inner.register_step_pre_hook(partial(_only_within, weakref.ref(outer), name))


def _only_within(reference: Any, name: str, inner: torch.optim.Optimizer, *_: object) -> None:
    outer = reference()
    if outer is not None and not (outer._dgc.superseded or outer._dgc.stepping):
        raise UnsupportedUse(STEPPED_INSIDE.format(outer=type(outer).__name__, inner=type(inner).__name__, name=name))


def other_methods(optimizer: torch.optim.Optimizer) -> list[str]:
    """Methods that the user's class has and torch's optimizers have not, one of which may step."""
    own, known = type(optimizer).__mro__[1], {*dir(torch.optim.Optimizer), "train", "eval"}  # weights of two kinds
    names = [name for name in dir(own) if not name.startswith("_") and name not in known]
    return [f"{name}()" for name in names if callable(getattr(own, name))]


def check_update_left(session: Session, p: torch.Tensor) -> None:
    """A backward pass has brought a gradient of `p`, and no step has applied the update that stood in ``p.grad``.

    Where a momentum has made it, it must not enter that again; with error feedback alone it is a gradient, as in stock
    Horovod. If the gradient is not added to it, the model's own ``zero_grad`` has dropped it.
    """
    if not session.watch.brought:
        return
    if session.watch.writes_to(p) != session.passes.per_step:
        session.tell_once("dropped", DROPPED)
    elif session.exchange.sparse and any(map(session.update.fading, session.optimizer.param_groups)):
        raise UnsupportedUse(ADDED_TO_UPDATE)


def check_not_stepped_otherwise(session: Session) -> None:
    """The update that stands in ``p.grad`` is to go, and ``step`` has not applied it."""
    methods = other_methods(session.optimizer)
    if methods and session.watch.weights_changed():
        name = type(session.optimizer).__name__
        raise UnsupportedUse(STEPPED_OTHERWISE.format(optimizer=name, methods=", ".join(methods)))


def lead_to_ours(optimizer: torch.optim.Optimizer) -> None:
    """Let whoever has taken a method of `optimizer` before its class became ours call that of the class of now.

    So a function that stands around ``step`` on the object (a scheduler's, the script's own) stays and ends in our
    ``step``. Followed are closures, attributes and names of modules; not a local variable, nor arguments of a partial.

    Cost: two passes over all objects of the process.
    """
    ours: Any = type(optimizer)
    own = ours.__mro__[1]
    names = {id(getattr(own, name)): name for name in vars(ours) if hasattr(own, name)}
    for taken in gc.get_referrers(optimizer):
        if isinstance(taken, MethodType) and taken.__self__ is optimizer and id(taken.__func__) in names:
            _replace(taken, MethodType(getattr(ours, names[id(taken.__func__)]), optimizer))
    # a scheduler keeps the function itself, beside a weak reference to its optimizer
    for cell in gc.get_referrers(own.step):
        for closure in gc.get_referrers(cell) if isinstance(cell, CellType) else ():
            if isinstance(closure, tuple) and _knows(closure, optimizer):
                cell.cell_contents = ours.step


def _replace(old: object, new: object) -> None:
    """Let whatever holds `old` under a name hold `new`."""
    for holder in gc.get_referrers(old):  # no comprehension, whose cell for `old` would be one of them
        if isinstance(holder, CellType):
            holder.cell_contents = new
            continue
        held: Any = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        for name, x in list(held.items()) if isinstance(held, dict) else ():
            if x is old:
                held[name] = new


def _knows(closure: tuple[Any, ...], optimizer: Any) -> bool:
    return any(isinstance(x, weakref.ref) and x() is optimizer for x in gc.get_referents(*closure))
