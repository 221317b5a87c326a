"""Where the momentum of a variable is, in an engine or in its optimizer's slots, and when what engines have is void.

A state machine of one optimizer; docs/decisions/tensorflow.md has its diagram. It refers to engines alone, never to
what asks it: an optimizer that is dropped takes u and v with it at once.
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
Place = tuple[int, Key]  # of a variable: which of the exchanges that have each a state of their own, and its key


class Holder:
    """What one exchange has of its variables.

    Args:
        places: its variables.
        names: their names in `buckets`.
        buckets: u, v and the second moment; others when the ranks change.

    Attributes:
        in_slots: whether the momentum is in the optimizer's slots, which the next step takes over.
    """

    def __init__(self, places: Sequence[Place], names: Sequence[str], buckets: OptimizerExchange) -> None:
        self.places, self.names, self.buckets, self.in_slots = places, names, buckets, True

    def begins(self, own_step: bool) -> bool:
        """A step begins, perhaps the `own_step` of the optimizer; returns whether the slots are to be taken over."""
        takes_over, self.in_slots = self.in_slots and not own_step, own_step
        return takes_over

    def bring(self, i: int, source: Holder, j: int) -> None:
        """Let variable i have what `source` has of its variable j."""
        here, there, name, its_name = self.buckets, source.buckets, self.names[i], source.names[j]
        if name in here.place and its_name in there.place:
            (engine, k), (other, m) = here.place[name], there.place[its_name]
            engine.state.move_in(k, other.state, m)
        if here.is_compressed(name):
            here.second[name].values[:] = there.second[its_name].values
            here.second.refresh(name)
            there.second.forget(its_name)


class SlotOwnership:
    """The holders of one optimizer, or of all tapes with the same settings.

    That a checkpoint was loaded it is told, or the optimizer's iterations jump.

    Args:
        stride: iterations from one exchange to the next, >= 1.
        grows: whether iterations grow with every step that is applied. A tape knows none, and local steps may have the
            same at two exchanges.
        ranks: those that exchange; the first one tells the user.

    Attributes:
        loaded: record of this rank that waits for the first exchange.
    """

    def __init__(self, stride: int, grows: bool, ranks: hvd.ProcessSet) -> None:
        self.stride, self._grows, self._ranks = stride, grows, ranks
        self.loaded: ResidualState | None = None
        self._holders: list[Holder] = []
        self._at: dict[Place, tuple[Holder, int]] = {}  # the exchange that had the variable last
        self._last: int | None = None  # iterations at the last exchange
        self._applied = 0  # steps of all exchanges by then
        self._again_at: int | None = None  # how many were applied when iterations had stayed
        self._untold = False  # whether the user is to hear of a reload

    def add(self, holder: Holder) -> Holder:
        """An exchange is made."""
        self._holders.append(holder)
        return holder

    def forget(self, holder: Holder) -> None:
        """An exchange is gone, with what it had."""
        self._holders.remove(holder)
        self._at = {place: at for place, at in self._at.items() if at[0] is not holder}

    # -- what happens

    def reloaded(self) -> None:
        """The optimizer's variables have been loaded: what is kept belongs to the weights before, and ends here.

        A flush or a file may come before the next step, which takes over the slots.
        """
        self.clear()
        self._untold = True
        for holder in self._holders:
            holder.in_slots = True

    def look(self, iterations: int) -> None:
        """The same, if the optimizer's iterations have jumped. Between two steps, before what is kept is used."""
        if self._jump_to(iterations):
            self.reloaded()

    def resumed(self, iterations: int) -> None:
        """Weights, optimizer and residuals have been loaded together, at `iterations`."""
        # as if their last step had been exchanged: local steps may exchange before the next one
        self._last, self._untold = iterations - 1, False

    def step_begins(self, holder: Holder, iterations: int) -> None:
        """A step of `holder` begins, at the optimizer's `iterations`: it gets what others have of its variables."""
        if self._stays_at(iterations) or self._jump_to(iterations):
            self.reloaded()
        if self._untold or (self._last is None and iterations >= self.stride):
            self._untold = False
            if self._ranks.rank() == 0:
                _log.warning(
                    "dgc_horovod: a checkpoint was loaded, the optimizer is at iteration %d; u and v belong to the "
                    "weights before, and start from zero",
                    iterations,
                )
        self._last = iterations
        for i, place in enumerate(holder.places):
            there = self._at.get(place)
            if there is not None and there[0] is not holder:
                holder.bring(i, *there)
            self._at[place] = holder, i

    def clear(self) -> None:
        """Empty u, v and the second moment: the weights are about to be others."""
        for holder in self._holders:
            holder.buckets.clear()
        if self.loaded is not None:
            self.loaded = dataclasses.replace(self.loaded, tensors={}, runs={}, second={})

    def empty(self, key: Key) -> None:
        """Let go of the u and v of a variable that is frozen; Adam's second moment stays, as in an optimizer's slot."""
        found = self.find(key)
        if found is not None:
            found[0].buckets.keep(found[1], {})

    # -- what is so

    def find(self, key: Key) -> tuple[Holder, str] | None:
        """The holder of what an optimizer's variable has, and its name there."""
        holder, i = self._at.get((0, key), (None, 0))
        return None if holder is None else (holder, holder.names[i])

    @property
    def holds_loaded(self) -> bool:
        """Whether something was loaded that waits for the first step."""
        return self.loaded is not None and bool(self.loaded.tensors)

    def _jump_to(self, iterations: int) -> bool:
        return self._last is not None and not 0 <= iterations - self._last <= _SKIPPED_AT_MOST * self.stride

    def _stays_at(self, iterations: int) -> bool:
        """Whether iterations are those of the last exchange, although its step was applied: a failed one is repeated.

        A script that sets iterations itself, at every step, is found out at its second.
        """
        counts = [holder.buckets.counts for holder in self._holders]
        before, self._applied = self._applied, sum(each.steps - each.skipped for each in counts)
        if not (self._grows and iterations == self._last and self._applied > before):
            return False
        self._grows = self._again_at is None or self._applied - self._again_at > 2 * len(counts)
        self._again_at = self._applied
        return self._grows
