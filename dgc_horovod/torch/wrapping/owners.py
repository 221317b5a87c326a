"""Which sessions there are in this process; a parameter belongs to the one that has taken it last."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from dgc_horovod.errors import UnsupportedUse

if TYPE_CHECKING:
    from dgc_horovod.torch.session.session import Session

_made: list[weakref.ref[Session]] = []  # in the order of wrapping, which is the same on every rank


def claim(session: Session) -> None:
    """Let the parameters of `session`, which has just begun, be its own.

    One that had some of them before gets no gradients any more. Its optimizer may still be alive: a script that wraps
    its model again drops the old one when it has the new one.
    """
    parameters = set(session.parameters.values())
    for other in all_alive():
        if not parameters.isdisjoint(other.parameters.values()):
            other.superseded = True
            for hook in other.hooks:
                hook.remove()
    _made[:] = [ref for ref in _made if ref() is not None]
    _made.append(weakref.ref(session))


def in_rounds(session: Session) -> list[Session]:
    """Earlier sessions with parameters of `session` that have made local steps since their last exchange."""
    if any(other.strategy.in_round for other in all_alive()):
        gc.collect()  # one that is garbage here may be gone already on other ranks
    parameters = {p for group in session.optimizer.param_groups for p in group["params"]}
    found = [other for other in all_alive() if other is not session and other.strategy.in_round]
    return [other for other in found if not parameters.isdisjoint(other.parameters.values())]


def live() -> list[Session]:
    """The sessions that compress and still have their parameters, in the order of wrapping."""
    return [session for session in all_alive() if not session.strategy.stock]


def all_alive() -> list[Session]:
    """Those that still have their parameters, whoever exchanges gradients at present."""
    found = [ref() for ref in _made]
    return [session for session in found if session is not None and session.alive]


def check(session: Session) -> None:
    """Raise UnsupportedUse if parameters of `session` have been wrapped for another one since."""
    if session.superseded:
        raise UnsupportedUse(
            "parameters of this DistributedOptimizer have been wrapped by another one since, which has their gradients "
            "now; step that one. Two optimizers over one model: give each its own parameters, or step them both inside "
            "one torch optimizer with two parameter groups"
        )
