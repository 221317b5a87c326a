"""Where u and v are, when a variable is exchanged now with these others and now with those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.state.residual_state import FIRST, SECOND

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

    def find(self, key: Any) -> tuple[BucketEngine, int] | None:
        """The engine that has the state of a variable, and its segment."""
        steps, i = self._at.get((0, key), (None, 0))
        return None if steps is None else steps.kept(i)

    def holder(self, key: Any) -> HostSteps | None:
        """The steps of the exchange that has the state of a variable."""
        return self._at.get((0, key), (None, 0))[0]

    def empty(self, key: Any) -> None:
        """Let go of the u and v of a variable that is frozen; Adam's moments stay, as in an optimizer's slots."""
        found = self.find(key)
        if found is not None:
            engine, i = found
            engine.state.write(
                i, {part: kept for part, kept in engine.state.read(i).items() if part in (FIRST, SECOND)}
            )

    def forget(self, steps: HostSteps) -> None:
        """Let go of `steps` and the state that is there."""
        self._at = {key: at for key, at in self._at.items() if at[0] is not steps}


def _move(to: HostSteps, i: int, source: HostSteps, j: int) -> None:
    here, there = to.kept(i), source.kept(j)
    if here is not None and there is not None:
        here[0].state.move_in(here[1], there[0].state, there[1])
        to.origins.move_in(str(i), source.origins, str(j))
