"""Which optimizers there are in this process; a parameter belongs to the one that has wrapped it last."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from dgc_horovod.errors import UnsupportedUse

_made: list[weakref.ref[Any]] = []  # in the order of wrapping, which is the same on every rank


def claim(optimizer: Any) -> None:
    """Let the parameters of `optimizer`, newly wrapped, be its own.

    An optimizer that had one of them before gets no gradients any more. It may still be alive: a script that wraps its
    model again drops the old optimizer when it has the new one.
    """
    parameters = set(optimizer._requires_update)
    for other in _owning():
        if not parameters.isdisjoint(other._requires_update):
            other._dgc_superseded = True
            for hook in other._grad_accs:
                hook.remove()
    _made[:] = [ref for ref in _made if ref() is not None]
    _made.append(weakref.ref(optimizer))


def in_rounds(optimizer: Any) -> list[Any]:
    """Earlier optimizers of parameters of `optimizer` that have made local steps since their last exchange."""
    if any(other._dgc_in_round for other in _owning()):
        gc.collect()  # one that is garbage here may be gone already on other ranks
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    found = [other for other in _owning() if other is not optimizer and other._dgc_in_round]
    return [other for other in found if not parameters.isdisjoint(other._requires_update)]


def live() -> list[Any]:
    """The optimizers that compress and still have their parameters, in the order of wrapping."""
    return [optimizer for optimizer in _owning() if not optimizer._dgc_stock]


def undecided() -> list[Any]:
    """Those whose exchange is still to be chosen."""
    return [optimizer for optimizer in _owning() if optimizer._dgc_is_undecided]


def automatic() -> list[Any]:
    """Those whose exchange is, or was, to be chosen by this rank and others."""
    return [optimizer for optimizer in _owning() if hasattr(optimizer, "_dgc_choice")]


def _owning() -> list[Any]:
    found = [ref() for ref in _made]
    return [optimizer for optimizer in found if optimizer is not None and not optimizer._dgc_superseded]


def check(optimizer: Any) -> None:
    """Raise UnsupportedUse if parameters of `optimizer` have been wrapped by another one since."""
    if optimizer._dgc_superseded:
        raise UnsupportedUse(
            "parameters of this DistributedOptimizer have been wrapped by another one since, which has their gradients "
            "now; step that one. Two optimizers over one model: give each its own parameters, or step them both inside "
            "one torch optimizer with two parameter groups"
        )
