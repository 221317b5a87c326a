"""Detection of steps that bypass an optimizer's own ``step``, and messages to a script."""

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
    "p.grad was changed between backward() and synchronize(), after the exchange had taken it; the change has no "
    "effect. To clip, pass clip_norm=c to the compression (dgcrun: --dgc-clip-norm c)"
)
UNSCALED_TOO_EARLY = (
    "GradScaler.unscale_ or step() ran before the gradients were synchronized. Call optimizer.synchronize() before "
    "scaler.unscale_(optimizer) and scaler.step(optimizer), the latter inside `with optimizer.skip_synchronize():`"
)
SCALER_NOT_PASSED = (
    "a GradScaler drives this optimizer, but the optimizer does not know its scale, and would add residuals of "
    "different scales; pass grad_scaler=scaler to DistributedOptimizer"
)
SCALER_LEFT_OUT = (
    "step() without the GradScaler that was passed as grad_scaler: the exchange would divide the gradients by its "
    "scale, but the loss was not scaled. Call scaler.step(optimizer); to train without a scale, pass a GradScaler that "
    "is not enabled"
)
CHANGED_UPDATE = (
    "the script changed p.grad between synchronize() and step(), by other means than clip_grad_norm_ and "
    "clip_grad_value_ of torch.nn.utils. After compression p.grad is an update that arrives in bursts; a part that is "
    "clipped off is lost. To clip, pass clip_norm=c to the compression (dgcrun: --dgc-clip-norm c), or call "
    "clip_grad_norm_, and remove the script's own clipping"
)
TAKEN_AWAY = (
    "the script has set the gradient of {name!r} to None between backward() and step(): its update is not applied, and "
    "its residual and momentum are dropped; otherwise they would be applied in a later burst"
)
DROPPED = (
    "zero_grad() has dropped an update that was not applied. Its gradients have entered the momentum, so a part of "
    "them comes with later updates. To limit large gradients, clip them before the exchange (clip_norm=c). If the "
    "backward pass was for another model, keep it away from this one (detach(), or requires_grad_(False) meanwhile)"
)
ADDED_TO_UPDATE = (
    "backward() was called between synchronize() and step(): its gradient was added to an update, which would pass "
    "through the exchange and the momentum a second time. Sum all backward passes of a step before they are exchanged "
    "(backward_passes_per_step), or call step() after each; to drop the update, call optimizer.zero_grad() before "
    "backward()"
)
SUPERSEDED = (
    "parameters of this optimizer have been wrapped by another one since, which gets their gradients now; step that "
    "one. Two optimizers cannot step the same parameters in turn: use one torch optimizer with two parameter groups"
)
STEPPED_TWICE = (
    "step() was called again with no backward pass and no zero_grad() since the last one; p.grad still holds the "
    "update that has been applied. Call backward() first"
)
STEPPED_INSIDE = (
    "{outer} was passed to register() or DistributedOptimizer(), but its inner optimizer .{name} ({inner}) was stepped "
    "outside of {outer}.step(). Checks for gradients that are not finite and for equal replicas, and local steps, are "
    "part of step(), and were skipped. Pass optimizer.{name} instead; with Horovod, assign the result to it"
)
STEPPED_OTHERWISE = (
    "{optimizer} has applied an update without step() (its other methods: {methods}), or the script has written to all "
    "weights. Checks for gradients that are not finite and for equal replicas are part of step(), and were skipped. "
    "Call step(), or use an optimizer whose step() makes the update. A script that drops the update and writes to "
    "weights (clamp_, load_state_dict) must call optimizer.zero_grad() between the two"
)
ADDED_LATER = (
    "a parameter of shape {shape} was added to the torch optimizer after it had been wrapped, when the ranks had "
    "already agreed on names and buckets. Add the group first, then wrap"
)
RESIDUALS_NOT_SAVED = (
    "optimizer.state_dict() holds no residuals: gradients that are not applied yet are lost where training resumes "
    "from it. Use save_checkpoint(), or the callback for transformers.Trainer, accelerate or Lightning "
    "(docs/integrations.md); or keep optimizer.residual_state_dict() of every rank beside it, or call "
    "optimizer.flush() on every rank before"
)
LOADED_TWICE = (
    "a second load_state_dict() before the next step has emptied the residuals and momentum that load_checkpoint() had "
    "loaded. accelerator.prepare(optimizer) calls load_state_dict(): call load_checkpoint() after it"
)
SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The second "
    "synchronization does nothing; put step() inside `with optimizer.skip_synchronize():`"
)


def is_trial(session: Session) -> bool:
    """Return whether this step only fills the state, as ``torch.distributed.checkpoint`` does before the first step.

    Its learning rates and gradients are zeros. One rank may make it alone, so nothing may be exchanged in it.
    """
    optimizer = session.optimizer
    if optimizer.state or session.passes.results or session.passes.synchronized:
        return False
    groups = optimizer.param_groups
    if any(group.get("lr", 0) for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    if any(session.watch.has_applied(grad) for grad in grads):  # a script's gradients, zeroed in place
        return False
    return all(grad is not None and not grad.is_sparse and not grad.any() for grad in grads)


def watch_inside(outer: torch.optim.Optimizer) -> None:
    """Raise an error from now on if an inner optimizer of `outer` steps outside the ``step`` of `outer`.

    Wrappers with other methods (SAM's ``second_step``) would skip everything that our ``step`` does.
    """
    own = {p for group in outer.param_groups for p in group["params"]}
    for name, inner in vars(outer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner is not outer:
            if not own.isdisjoint(p for group in inner.param_groups for p in group["params"]):
                inner.register_step_pre_hook(partial(_only_within, weakref.ref(outer), name))


def _only_within(reference: weakref.ref[Any], name: str, inner: torch.optim.Optimizer, *_: object) -> None:
    outer = reference()
    if outer is not None and not (outer._dgc.superseded or outer._dgc.stepping):
        raise UnsupportedUse(STEPPED_INSIDE.format(outer=type(outer).__name__, inner=type(inner).__name__, name=name))


def check_update_left(session: Session, p: torch.Tensor) -> None:
    """Check ``p.grad`` after a backward pass when no step has applied the update in it.

    An update with momentum must not enter the momentum again; with error feedback alone it is a gradient, as in stock
    Horovod. If the gradient was not added to the update, the model's own ``zero_grad`` has dropped the update.

    Raises:
        UnsupportedUse: the gradient was added to an update with momentum.
    """
    if not session.watch.brought:
        return
    if session.watch.writes_to(p) != session.passes.per_step:
        session.tell_once("dropped", DROPPED)
    elif session.exchange.sparse and any(map(session.update.fading, session.optimizer.param_groups)):
        raise UnsupportedUse(ADDED_TO_UPDATE)


def check_not_stepped_otherwise(session: Session) -> None:
    """Raise UnsupportedUse if another method than ``step`` has applied the update that is to be cleared.

    Methods of the user's class that torch's optimizers do not have may step.
    """
    own = type(session.optimizer).__mro__[1]
    known = {*dir(torch.optim.Optimizer), "train", "eval"}  # the latter two only switch weights
    names = [name for name in dir(own) if not name.startswith("_") and name not in known]
    methods = [f"{name}()" for name in names if callable(getattr(own, name))]
    if methods and session.watch.weights_changed():
        name = type(session.optimizer).__name__
        raise UnsupportedUse(STEPPED_OTHERWISE.format(optimizer=name, methods=", ".join(methods)))


def lead_to_ours(optimizer: torch.optim.Optimizer) -> None:
    """Redirect references to methods of `optimizer` from before its class was replaced to the methods of its new class.

    A function around ``step`` on the object (a scheduler's, the script's own) then calls our ``step``. Closures,
    attributes and names of modules are redirected; local variables and arguments of a partial are not.

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
            held = gc.get_referents(*closure) if isinstance(closure, tuple) else ()
            if any(isinstance(x, weakref.ref) and x() is optimizer for x in held):
                cell.cell_contents = ours.step


def _replace(old: object, new: object) -> None:
    """Replace `old` by `new` in every closure, attribute and dict that holds it."""
    for holder in gc.get_referrers(old):  # not a comprehension, whose cell for `old` would be a referrer too
        if isinstance(holder, CellType):
            holder.cell_contents = new
            continue
        held: Any = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
        for name, x in list(held.items()) if isinstance(held, dict) else ():
            if x is old:
                held[name] = new
