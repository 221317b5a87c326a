"""What a session keeps, in parts that register themselves: what saves, loads, hands on or takes back walks them."""

from __future__ import annotations

from typing import Protocol

from dgc_horovod.state.method import check_kept
from dgc_horovod.state.residual_state import ResidualState


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
