"""Steps that reach an optimizer in other ways than by its own ``step``, and one that is no step of training."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import CellType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.wrapping.notices import ADDED_TO_UPDATE, DROPPED, STEPPED_INSIDE, STEPPED_OTHERWISE

if TYPE_CHECKING:
    from dgc_horovod.torch.session.session import Session


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
