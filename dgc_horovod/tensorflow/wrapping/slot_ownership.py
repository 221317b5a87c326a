"""The place of a variable's momentum, in an engine or in the optimizer's slots, and the detection of reloads.

A state machine of one optimizer; docs/decisions/tensorflow.md has its diagram. Holders refer to it weakly: u and v are
freed with the optimizer at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import horovod.tensorflow as hvd

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.wrapping.variables import Key

_log = logging.getLogger("dgc_horovod")
_SKIPPED_AT_MOST = 100  # exchanges that a script may leave out between two
Place = tuple[int, Key]  # of a variable: index among the exchanges with states of their own, and key


class Holder:
    """The state of one exchange's variables.

    Args:
        places: places of the variables.
        names: names of the variables in `buckets`.
        buckets: u, v and the second moment; replaced when the ranks change.

    Attributes:
        in_slots: whether the momentum is in the optimizer's slots, which the next step takes over.
    """

    def __init__(self, places: Sequence[Place], names: Sequence[str], buckets: OptimizerExchange) -> None:
        self.places, self.names, self.buckets, self.in_slots = places, names, buckets, True

    def begins(self, own_step: bool) -> bool:
        """Begin a step, or an `own_step` of the optimizer; returns whether the slots are to be taken over."""
        takes_over, self.in_slots = self.in_slots and not own_step, own_step
        return takes_over

    def bring(self, i: int, source: Holder, j: int) -> None:
        """Move the state of variable j of `source` to variable i."""
        here, there, name, its_name = self.buckets, source.buckets, self.names[i], source.names[j]
        if name in here.place and its_name in there.place:
            (engine, k), (other, m) = here.place[name], there.place[its_name]
            engine.state.move_in(k, other.state, m)
        if here.is_compressed(name):
            here.second[name].know(there.second[its_name].values)
            there.second.forget(its_name)


class SlotOwnership:
    """The holders of one optimizer, or of all tapes with the same settings.

    A reload of a checkpoint is reported by `reloaded`, or detected by a jump of the optimizer's iterations.

    Args:
        stride: iterations from one exchange to the next, >= 1.
        grows: whether iterations grow with every applied step. A tape has none, and local steps may have the same at
            two exchanges.
        ranks: ranks that exchange; the first one logs messages.

    Attributes:
        loaded: record of this rank for the first exchange, which is not made yet.
    """

    def __init__(self, stride: int, grows: bool, ranks: hvd.ProcessSet) -> None:
        self.stride, self._grows, self._ranks = stride, grows, ranks
        self.loaded: ResidualState | None = None
        self._holders: list[Holder] = []
        self._at: dict[Place, tuple[Holder, int]] = {}  # the last exchange of the variable
        self._last: int | None = None  # iterations at the last exchange
        self._applied = 0  # applied steps of all exchanges at that time
        self._again_at: int | None = None  # the same at the last repeated iteration
        self._untold = False  # whether a reload is not logged yet

    def add(self, holder: Holder) -> Holder:
        """Add the holder of a new exchange."""
        self._holders.append(holder)
        return holder

    def forget(self, holder: Holder) -> None:
        """Remove the holder of a deleted exchange."""
        self._holders.remove(holder)
        self._at = {place: at for place, at in self._at.items() if at[0] is not holder}

    # -- events

    def reloaded(self) -> None:
        """Drop the engines' state, which belongs to the weights before: the optimizer's variables were loaded.

        The next step takes over the slots; a flush or a save may come before it.
        """
        self.clear()
        self._untold = True
        for holder in self._holders:
            holder.in_slots = True

    def look(self, iterations: int) -> None:
        """Call `reloaded` if the optimizer's iterations have jumped. For use between steps, before state is read."""
        if self._jump_to(iterations):
            self.reloaded()

    def resumed(self, iterations: int) -> None:
        """Note that weights, optimizer and residuals were loaded together, at `iterations`."""
        # as if the last step had been exchanged: local steps may exchange before the next one
        self._last, self._untold = iterations - 1, False

    def step_begins(self, holder: Holder, iterations: int) -> None:
        """Begin a step of `holder` at the optimizer's `iterations`: move its variables' state from other holders."""
        if self._stays_at(iterations) or self._jump_to(iterations):
            self.reloaded()
        if self._untold or (self._last is None and iterations >= self.stride):
            self._untold = False
            if self._ranks.rank() == 0:
                _log.warning(
                    "dgc_horovod: a checkpoint was loaded, the optimizer is at iteration %d; u and v, which belong to "
                    "the weights before, start from zero",
                    iterations,
                )
        self._last = iterations
        for i, place in enumerate(holder.places):
            there = self._at.get(place)
            if there is not None and there[0] is not holder:
                holder.bring(i, *there)
            self._at[place] = holder, i

    def clear(self) -> None:
        """Empty u, v and the second moment, before the weights are replaced."""
        for holder in self._holders:
            holder.buckets.clear()
        if self.loaded is not None:
            self.loaded = dataclasses.replace(self.loaded, tensors={}, runs={}, second={})

    def empty(self, key: Key) -> None:
        """Empty u and v of a frozen variable; Adam's second moment stays, as in an optimizer's slot."""
        found = self.find(key)
        if found is not None:
            found[0].buckets.keep(found[1], {})

    # -- queries

    def find(self, key: Key) -> tuple[Holder, str] | None:
        """Return the holder of a variable's state, and the variable's name there."""
        holder, i = self._at.get((0, key), (None, 0))
        return None if holder is None else (holder, holder.names[i])

    @property
    def holds_loaded(self) -> bool:
        """Whether residuals were loaded for the first step, which is not made yet."""
        return self.loaded is not None and bool(self.loaded.tensors)

    def _jump_to(self, iterations: int) -> bool:
        return self._last is not None and not 0 <= iterations - self._last <= _SKIPPED_AT_MOST * self.stride

    def _stays_at(self, iterations: int) -> bool:
        """Whether iterations are those of the last exchange, although its step was applied: weights were reloaded.

        A failed step is repeated. A script that sets iterations itself, at every step, is detected at the second one.
        """
        counts = [holder.buckets.counts for holder in self._holders]
        before, self._applied = self._applied, sum(each.steps - each.skipped for each in counts)
        if not (self._grows and iterations == self._last and self._applied > before):
            return False
        self._grows = self._again_at is None or self._applied - self._again_at > 2 * len(counts)
        self._again_at = self._applied
        return self._grows
