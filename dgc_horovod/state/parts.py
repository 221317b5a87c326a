"""The state of a rank: the parts that register themselves, and residuals for another method or other ranks.

What the residuals hold has a name, the method; a rank goes on from those of its own method alone. Other ranks take over
shares of the residuals, with the same combined residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, REMAINDER, RESIDUAL, ResidualState

GRADIENTS, CHANGES, ADAM_UPDATES = "gradients", "changes of weights", "updates of Adam"


def check_kept(state: ResidualState, method: str) -> None:
    """Raise CheckpointError unless an optimizer can go on from the residuals of `state`.

    Args:
        state: record, without the slots that are the optimizer's own.
        method: content of the optimizer's residuals now.
    """
    local = CHANGES in (state.method, method)  # the optimizer's own moments would be taken for others
    if state.method != method and state.tensors and (local or (state.method and not is_flushed(state))):
        flush = "" if local else "call flush() before saving to change them, "
        raise CheckpointError(  # records of earlier versions do not say what they hold
            f"the residuals hold {state.method or GRADIENTS}, and this optimizer's hold {method}; use the method and "
            f'the kind of optimizer that they were saved with, {flush}or drop them (residuals="ignored")'
        )
    for name, arrays in state.tensors.items():
        if FIRST in arrays and method != CHANGES:  # local steps: moments in the record are the optimizer's own
            raise CheckpointError(
                f"the record of {name!r} has moments of Adam that are this rank's own, as in versions of dgc_horovod "
                'without a shared second moment: pass residuals="ignored" to load weights and optimizer alone, or call '
                "flush() with the version that saved it, and save again"
            )


def left_of(state: ResidualState) -> list[list[np.ndarray]]:
    """Return what would be lost of `state` if nothing is compressed any more, by tensor; nothing right after a flush.

    With local steps momentum and moments are the optimizer's own.
    """
    parts = (RESIDUAL, REMAINDER) if state.method == CHANGES else (RESIDUAL, REMAINDER, MOMENTUM)
    if state.method == ADAM_UPDATES and not state.second:
        return []  # flushed: only rounding errors of small tensors are left, which Adam cannot apply
    every = ([of[part] for part in parts if part in of and of[part].any()] for of in state.tensors.values())
    return [found for found in every if found]


def is_flushed(state: ResidualState) -> bool:
    """Whether `left_of` finds nothing."""
    return not left_of(state)


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
        parts: parts that are saved and loaded as well; more may be added.
    """

    def __init__(self, waiting: Waiting, method: str, parts: list[StatePart]) -> None:
        self._waiting, self._method, self.parts = waiting, method, parts

    def record(self, own: bool = True) -> ResidualState:
        """Return a copy of everything; `own`: also of the slots in the user's optimizer that are this rank's alone."""
        state = self._waiting.residuals()
        state.method = self._method
        for part in self.parts:
            if own or not part.in_optimizer:
                part.put(state)
        return state

    def check(self, state: ResidualState) -> ResidualState:
        """Check `state`, and return its residuals in buckets; nothing is changed.

        Raises:
            CheckpointError: no session of this method, model and place can go on from it.
        """
        for part in self.parts:
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
        for part in self.parts:
            part.resume(state)


def shares(rank: int, workers: int, before: int, averages: bool) -> dict[int, float]:
    """Return the share of each old rank's residual that a new rank takes over, by old rank.

    The old ranks' residuals divide [0, 1), the new ranks' too; a new one takes the parts that its own overlaps.
    The combined residual does not change: ``(1/N) * sum of v`` if gradients are averaged, ``sum of v`` if they are
    summed. From 4 to 2 ranks it is the mean (the sum) of pairs, from 2 to 4 copies (halves).

    Args:
        rank, workers: index of the new rank, 0 <= rank < workers, and number of ranks now; or of the node, and nodes.
        before: number of ranks before, >= 1.
        averages: whether gradients are averaged.
    """
    scale = before if averages else workers
    found = {}
    for old in range(before):  # in units of 1 / (before * workers)
        overlap = min((old + 1) * workers, (rank + 1) * before) - max(old * workers, rank * before)
        if overlap > 0:
            found[old] = overlap / scale
    return found


def needed(topology: Topology, before: int, node_size: int, cut_alike: bool = True) -> list[int]:
    """Return the old ranks whose states a worker needs.

    Args:
        topology: place of the worker now.
        before, node_size: number of ranks before, and of workers of a node.
        cut_alike: whether the buckets are the same as before, and with them the slices of the workers of a node.
    """
    if _goes_on(topology, before, node_size, cut_alike):
        return [topology.rank]
    return list(shares(topology.node, topology.nodes, before, averages=True))


def _goes_on(topology: Topology, before: int, node_size: int, cut_alike: bool) -> bool:
    """Whether a worker goes on from its own state; one without slices fits into any buckets."""
    return (before, node_size) == (topology.workers, topology.node_size) and (cut_alike or node_size == 1)


def handed_on(states: Mapping[int, ResidualState], topology: Topology, cut_alike: bool = True) -> ResidualState:
    """Return the state of a worker from the states of the old ranks that `needed` names.

    If the worker shares its node, it is the state of all workers of the node: each takes its slice of it.

    Args:
        states: states of old ranks, by rank, at least one; a lost one is missing, and counts as zero.
        topology: place of the worker now.
        cut_alike: see `needed`.

    Raises:
        CheckpointError: the states are not of the same model.
    """
    rank, workers, one = topology.rank, topology.workers, next(iter(states.values()))
    if _goes_on(topology, one.workers, one.node_size, cut_alike) and rank in states:
        return states[rank]
    made = ResidualState(rank, workers, one.averages, node_size=topology.node_size, method=one.method, **one.shared)
    made.second = next((state.second for state in states.values() if state.second), {})
    weights = shares(topology.node, topology.nodes, one.workers, one.averages)
    for old, state in states.items():
        for name, count in state.directions.items():
            made.directions[name] = max(count, made.directions.get(name, 0))
        for name, arrays in state.as_one_of_all().tensors.items():
            for part, array in arrays.items():
                ours = made.tensors.setdefault(name, {})
                taken = array * np.float32(weights.get(old, 0.0))
                if part in ours and ours[part].size != taken.size:
                    raise CheckpointError(
                        f"the residual of {name!r} has {taken.size} elements in the record of rank {old}, and "
                        f"{ours[part].size} in those before; they must be of the same model"
                    )
                ours[part] = ours[part] + taken if part in ours else taken
    return made
