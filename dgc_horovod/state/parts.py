"""The parts of a checkpoint, which register themselves, and the method that they belong to."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, REMAINDER, RESIDUAL, ResidualState

GRADIENTS, CHANGES, ADAM_UPDATES = "gradients", "changes of weights", "updates of Adam"


def check_kept(state: ResidualState, method: str) -> None:
    """Raise CheckpointError unless an optimizer can go on from the residuals of `state`.

    Args:
        state: record, without the slots that are the optimizer's own.
        method: content of the optimizer's residuals now.
    """
    local = CHANGES in (state.method, method)  # the optimizer's own moments would be taken for others
    if state.method not in ("", method) and state.tensors and (local or not is_flushed(state, local=False)):
        flush = "" if local else "call flush() before saving to change them, "
        raise CheckpointError(  # records of earlier versions do not say what they hold
            f"the residuals hold {state.method}, and this optimizer's hold {method}; use the method and the kind of "
            f"optimizer that they were saved with, {flush}or drop them "
            '(residuals="ignored")'
        )
    for name, arrays in state.tensors.items():
        if FIRST in arrays and method != CHANGES:  # local steps: moments in the record are the optimizer's own
            raise CheckpointError(
                f"the record of {name!r} has moments of Adam that are this rank's own, as in versions of dgc_horovod "
                'without a shared second moment: pass residuals="ignored" to load weights and optimizer alone, or call '
                "flush() with the version that saved it, and save again"
            )


def left_of(state: ResidualState, local: bool) -> list[list[np.ndarray]]:
    """Return what would be lost of `state` if nothing is compressed any more, by tensor; nothing right after a flush.

    Args:
        state: record of a rank.
        local: whether it was saved with local steps: its momentum and moments are the optimizer's own then.
    """
    parts = (RESIDUAL, REMAINDER) if local else (RESIDUAL, REMAINDER, MOMENTUM)
    if state.method == ADAM_UPDATES and not state.second:
        return []  # flushed: only rounding errors of small tensors are left, which Adam cannot apply
    every = ([of[part] for part in parts if part in of and of[part].any()] for of in state.tensors.values())
    return [found for found in every if found]


def is_flushed(state: ResidualState, local: bool) -> bool:
    """Whether `left_of` finds nothing."""
    return not left_of(state, local)


class StatePart:
    """State of a rank beside the residuals in buckets, and its place in the rank's record."""

    in_optimizer = False  # whether it is in the user's optimizer, which is saved separately in an elastic job

    def put(self, state: ResidualState) -> None:
        """Put it into a record of this rank."""

    def without(self, state: ResidualState) -> ResidualState:
        """Return `state` without the fields of this part; `state` is not changed.

        Raises:
            CheckpointError: it is of another model.
        """
        return state

    def resume(self, state: ResidualState) -> None:
        """Go on from the record of `put`; all parts have checked it before."""


class Waiting(Protocol):
    """The residuals in the buckets of one exchange."""

    def residuals(self) -> ResidualState:
        """Return a copy: a record of this rank, with its place and the step."""

    def check_fits(self, state: ResidualState) -> None:
        """Raise CheckpointError unless `load` can take `state`."""

    def load(self, state: ResidualState) -> object:
        """Go on from `state`."""


class StateRegister:
    """The state of one session.

    Args:
        waiting: residuals in its buckets.
        method: content of the residuals, in words, see `state.method`.
    """

    def __init__(self, waiting: Waiting, method: str) -> None:
        self._waiting, self._method = waiting, method
        self._parts: list[StatePart] = []

    def register(self, part: StatePart) -> None:
        """Save and load `part` as well from now on."""
        self._parts.append(part)

    def record(self, own: bool = True) -> ResidualState:
        """Return a copy of everything; `own`: also of the slots in the user's optimizer that are this rank's alone."""
        state = self._waiting.residuals()
        state.method = self._method
        for part in self._parts:
            if own or not part.in_optimizer:
                part.put(state)
        return state

    def check(self, state: ResidualState) -> ResidualState:
        """Check `state`, and return its residuals in buckets; nothing is changed.

        Raises:
            CheckpointError: no session of this method, model and place can go on from it.
        """
        for part in self._parts:
            state = part.without(state)
        check_kept(state, self._method)
        self._waiting.check_fits(state)
        return state

    def resume(self, state: ResidualState) -> None:
        """Go on from a `record`.

        Raises:
            CheckpointError: see `check`.
        """
        self._waiting.load(self.check(state))
        for part in self._parts:
            part.resume(state)
