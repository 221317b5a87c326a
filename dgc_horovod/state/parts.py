"""What a checkpoint is made of: parts that register themselves, and the method that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import (
    FROZEN_SINCE,
    MOMENTUM,
    REMAINDER,
    RESIDUAL,
    Arrays,
    ResidualState,
    refuse_moments,
)

GRADIENTS, CHANGES, SGD_UPDATES, ADAM_UPDATES = "gradients", "changes of weights", "updates of SGD", "updates of Adam"


def check_kept(state: ResidualState, method: str) -> None:
    """Raise CheckpointError unless residuals of `state` are some that an optimizer can go on from.

    Args:
        state: record, without what is the optimizer's own.
        method: what those of the optimizer hold now.
    """
    local = CHANGES in (state.method, method)  # the optimizer's own moments would be taken for others
    if state.method not in ("", method) and state.tensors and (local or not is_flushed(state, local=False)):
        flush = "" if local else "call flush() before saving to change them, "
        raise CheckpointError(  # records of earlier versions do not say what they hold
            f"the residuals hold {state.method}, and this optimizer's hold {method}; go on with the method and the "
            f"kind of optimizer that they were saved with, {flush}or go on without them "
            '(residuals="ignored"): what was not sent is lost then'
        )
    if method != CHANGES:  # local steps: moments in the record are the optimizer's own
        refuse_moments(state)


def refuse_missing(names: Sequence[str]) -> NoReturn:
    """Raise CheckpointError: a record lacks these tensors, which are trained now."""
    raise CheckpointError(f"there are no residuals of {', '.join(map(repr, names[:3]))}: {FROZEN_SINCE}")


@dataclass(frozen=True)
class Left:
    """What a rank has kept that the model has not had: of how many tensors, and its norm, squared."""

    tensors: int
    squares: float


def left_of(state: ResidualState, local: bool) -> Left:
    """What of `state` is lost where nothing is compressed any more; nothing right after a flush.

    Args:
        state: record of a rank.
        local: whether it was kept with local steps: its momentum and moments are the optimizer's own then.
    """
    lost = _lost(state, local)
    squares = sum(float(np.square(x, dtype=np.float64).sum()) for arrays in lost for x in arrays)
    return Left(len(lost), squares)


def is_flushed(state: ResidualState, local: bool) -> bool:
    """Whether `left_of` finds nothing."""
    return not _lost(state, local)


def _lost(state: ResidualState, local: bool) -> list[list[np.ndarray]]:
    parts = (RESIDUAL, REMAINDER) if local else (RESIDUAL, REMAINDER, MOMENTUM)
    kept = state.tensors.values()
    if state.method == ADAM_UPDATES and not state.second:
        return []  # flushed: what is there is what coding has left of small tensors, which Adam cannot apply
    return [found for arrays in kept if (found := _some(arrays, parts))]


def _some(arrays: Arrays, parts: tuple[str, ...]) -> list[np.ndarray]:
    return [arrays[part] for part in parts if part in arrays and arrays[part].any()]


class StatePart:
    """Something that a rank keeps beside what waits in buckets, and its place in the rank's record."""

    in_optimizer = False  # whether it stands in the user's optimizer, which is saved apart in an elastic job

    def put(self, state: ResidualState) -> None:
        """Put it into a record of this rank."""

    def without(self, state: ResidualState) -> ResidualState:
        """`state` without what no other part knows; nothing is changed.

        Raises:
            CheckpointError: it is of another model.
        """
        return state

    def resume(self, state: ResidualState) -> None:
        """Go on from what `put` has put there; all parts have looked at the record before."""


class Waiting(Protocol):
    """What waits in the buckets of one exchange."""

    def residuals(self) -> ResidualState:
        """A copy of it: a record of this rank, with its place and the step."""

    def check_fits(self, state: ResidualState) -> None:
        """Raise CheckpointError unless `load` can take `state`."""

    def load(self, state: ResidualState) -> object:
        """Go on from `state`."""


class StateRegister:
    """All that one session keeps.

    Args:
        waiting: what waits in its buckets.
        method: what that is, in words, see `state.method`.
    """

    def __init__(self, waiting: Waiting, method: str) -> None:
        self._waiting, self._method = waiting, method
        self._parts: list[StatePart] = []

    def register(self, part: StatePart) -> None:
        """From now on `part` is saved and loaded as well."""
        self._parts.append(part)

    def record(self, own: bool = True) -> ResidualState:
        """A copy of everything. `own`: also of what stands in the user's optimizer, and is this rank's alone."""
        state = self._waiting.residuals()
        state.method = self._method
        for part in self._parts:
            if own or not part.in_optimizer:
                part.put(state)
        return state

    def check(self, state: ResidualState) -> ResidualState:
        """What of `state` waits in buckets; nothing is changed.

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
