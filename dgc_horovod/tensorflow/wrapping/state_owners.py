"""Where u and v are, when a variable is exchanged now with these others and now with those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dgc_horovod.core.optimizer_exchange import OptimizerExchange

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.gradients.host_steps import HostSteps


class Homes:
    """Where the u and v of each variable are: with the exchange that had its gradient last."""

    def __init__(self) -> None:
        self._at: dict[Any, tuple[HostSteps, int]] = {}
        self._generation = 0

    def renew(self, generation: int) -> None:
        """Empty all of them if `generation` is another one: the weights are others."""
        if generation != self._generation:
            self._generation = generation
            for steps in {at[0] for at in self._at.values()}:
                if steps.buckets is not None:
                    steps.buckets.clear()

    def adopt(self, generation: int) -> None:
        """What is here belongs to `generation`."""
        self._generation = generation

    def bring(self, to: HostSteps, keys: Sequence[Any]) -> None:
        """Let `to` have the state of its variables, wherever it is."""
        for i, key in enumerate(keys):
            there = self._at.get(key)
            if there is not None and there[0] is not to:
                _move(to, i, *there)
            self._at[key] = to, i

    def find(self, key: Any) -> tuple[OptimizerExchange, str] | None:
        """The buckets that have the state of a variable, and its name there."""
        steps, i = self._at.get((0, key), (None, 0))
        return None if steps is None or steps.buckets is None else (steps.buckets, steps.name_of(i))

    def holder(self, key: Any) -> HostSteps | None:
        """The steps of the exchange that has the state of a variable."""
        return self._at.get((0, key), (None, 0))[0]

    def empty(self, key: Any) -> None:
        """Let go of the u and v of a variable that is frozen; Adam's second moment stays, as in an optimizer's slot."""
        found = self.find(key)
        if found is not None:
            found[0].keep(found[1], {})

    def forget(self, steps: HostSteps) -> None:
        """Let go of `steps` and the state that is there."""
        self._at = {key: at for key, at in self._at.items() if at[0] is not steps}


def _move(to: HostSteps, i: int, source: HostSteps, j: int) -> None:
    here, there, name, its_name = to.buckets, source.buckets, to.name_of(i), source.name_of(j)
    if here is None or there is None:
        return
    if name in here.place and its_name in there.place:
        (engine, k), (other, m) = here.place[name], there.place[its_name]
        engine.state.move_in(k, other.state, m)
    if here.is_compressed(name):
        here.second[name].values[:] = there.second[its_name].values
        here.second.refresh(name)
        there.second.forget(its_name)
