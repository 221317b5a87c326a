"""What ``KerasState`` does of an optimizer with local steps: a commit remembers the round, a meeting begins one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dgc_horovod.tensorflow.broadcast import broadcast_variables
from dgc_horovod.tensorflow.session.local import LocalSteps
from dgc_horovod.tensorflow.session.session import session_of


class RoundState:
    """The round of an optimizer in an elastic job; of one without local steps there is none, and nothing to do.

    A commit exchanges nothing. It remembers the anchor and the place in the round with this rank's own weights and
    inner optimizer, so that to go back to it is to be in that round again. Where the ranks meet anew, all go on from
    the weights of rank 0, and begin a round with them: what the others have changed since their last exchange is lost,
    so that a commit right after an exchange is the one that loses nothing. `e` and the inner optimizer stay with each
    rank; a newcomer takes over the inner optimizer of rank 0.

    Args:
        optimizer: Keras optimizer, built.

    Memory: of a commit, beside what every commit keeps: anchor and outer momentum, as much as the weights each.
    """

    def __init__(self, optimizer: Any) -> None:
        session = session_of(optimizer)
        self._steps = session.strategy if session is not None and isinstance(session.strategy, LocalSteps) else None

    @property
    def variables(self) -> list[Any]:
        """What is this rank's own beside weights and slots, and belongs to a commit."""
        rounds = None if self._steps is None else self._steps.rounds
        return [] if rounds is None else [rounds.calls, rounds.fresh, *rounds.anchors, *rounds.outer]

    def meet(self, broadcast: Callable[[], None], is_newcomer: bool) -> None:
        """Let `broadcast` give every rank the variables of rank 0, and begin a round with them.

        Args:
            broadcast: function that sends weights and the optimizer's variables.
            is_newcomer: whether this rank has made no step, so that its inner optimizer is nobody's.
        """
        if self._steps is None:
            return broadcast()
        rounds = self._steps.rounds
        slots = [] if is_newcomer else self._steps.slots
        inner, outer = values_of(slots), values_of(rounds.outer)
        broadcast()  # weights that have been set have no outer momentum
        assign_values(slots, inner)
        assign_values(rounds.outer, outer)
        if outer:
            broadcast_variables(rounds.outer, root_rank=0)
        rounds.calls.assign(0)
        rounds.fresh.assign(True)
        return None


def values_of(variables: Iterable[Any]) -> list[np.ndarray]:
    """Copies of what variables hold."""
    return [variable.numpy() for variable in variables]


def assign_values(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    """Let variables hold what `values_of` gave."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
