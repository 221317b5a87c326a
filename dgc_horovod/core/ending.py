"""How a step ends that is not applied: where the reason lay, and what becomes of what was sent in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dgc_horovod.core.engine import BucketEngine

# In place of the ranks whose gradient was not finite
LEFT_OUT, TRIED_AGAIN = "no rank: an update was too large", "no rank: an update times the loss scale was too large"
WEIGHTS = "the weights of "  # and a name, where they are why no gradient is finite
IN_A_ROW = 3  # steps with an update that is too large, after which all that waits is left out


def unscaled() -> float:
    """The loss scale where there is none."""
    return 1.0


class Ending:
    """Tells a gradient that is not finite from an update that is too large for its dtype.

    Of the first, what was sent is taken back. Taken back, the second would be sent again at the next step, be too large
    again, and so for ever: it is left out. Only a loss scale that falls may let it fit, so it is tried again while the
    scale does. If it is too large in several steps in a row, so is too much of what waits: all of that is left out.

    Args:
        engines: engines of the optimizer.

    Attributes:
        spoilt: function that an adapter sets: the name of a variable whose weights are not finite, "" if there is none.
            It is called where a gradient was not finite, and nowhere else.
    """

    def __init__(self, engines: Sequence[BucketEngine]) -> None:
        self._engines = engines
        self._too_large = self._spoilt = ""
        self._scale, self._in_a_row = math.inf, 0
        self.spoilt: Callable[[], str] = str

    def begin(self) -> None:
        """A step begins."""
        self._too_large = self._spoilt = ""

    def judge(self, updates: bool, others: bool = True, loss_scale: Callable[[], float] = unscaled) -> bool:
        """Whether the step may be applied: the same on every rank, as updates and flags are.

        Args:
            updates: whether what was put together of every bucket is finite, in its own dtype.
            others: whether what came of the gradients that are in no bucket is finite.
            loss_scale: function that gives the factor of the gradients, > 0, by which updates are multiplied.
        """
        found = [engine.outcome for engine in self._engines]
        if updates or not others or not all(outcome.finite for outcome in found):
            self._scale, self._in_a_row = math.inf, 0
            self._spoilt = "" if updates and others else self.spoilt()
            return updates and others
        scale = 1.0 if any(outcome.overflowed for outcome in found) else loss_scale()
        if 1 < scale < self._scale:
            self._too_large, self._scale = TRIED_AGAIN, scale
        else:
            self._too_large, self._in_a_row = LEFT_OUT, self._in_a_row + 1
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether what was sent in this step is left out, and not taken back."""
        return self._too_large == LEFT_OUT

    @property
    def empties(self) -> bool:
        """Whether all that waits is."""
        return self.leaves_out and self._in_a_row >= IN_A_ROW

    def where(self) -> str:
        """In words, where a gradient of the last step was not finite; the same on ranks that have the same weights."""
        if self._too_large or self._spoilt:
            return self._too_large or f"{WEIGHTS}{self._spoilt!r}"
        found = [engine for engine in self._engines if engine.outcome.flagged]
        if not found:
            return "some rank"
        ranks = sorted({rank for engine in found for rank in engine.outcome.flagged})
        names = [segment.name for engine in found for segment in engine.whole.segments]
        among = f"{names[0]!r}" if len(names) == 1 else f"the {len(names)} tensors from {names[0]!r} to {names[-1]!r}"
        size = self._engines[0].topology.node_size
        if size == 1:
            return f"rank {', '.join(map(str, ranks))}, among {among}"
        nodes = sorted({rank // size for rank in ranks})  # whose workers have averaged
        return "; ".join(f"one of ranks {n * size} to {(n + 1) * size - 1}" for n in nodes) + f", among {among}"
