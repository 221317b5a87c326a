"""When a second moment has settled that is learnt in dense steps, so that these can end before their time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dgc_horovod.schedule import WarmupSchedule

INTERVAL = 10  # steps from one measurement to the next


class Settling:
    """The density warm-up of one optimizer, whose dense first stage ends once Adam's second moment has settled.

    Over the last ``1/(1-b2)`` steps its l1 norm has changed by a factor of at most ``1 + until_settled``, and the
    learning rate has not risen; not before ``2/(1-b2)`` steps, when half of it can be older than that. The norm is not
    divided by ``1-b2^t``: as long as that grows, the average is still of few gradients, and counts as one that changes.

    The first rank measures and decides, and tells the others: their own norms might differ in the last bit.

    Args:
        given: schedule that the user has given; None: no warm-up.
        final_density: density after it, in (0, 1].

    Attributes:
        settled_at: step, from 0, that was the first after the dense ones; None where they have not ended so.
        measured: [Adam's step, l1 norm, learning rate] of the measurements of the last window, oldest first.

    Source: 1-bit Adam (arXiv 2102.02888) proposes a bound on the norm's change; this form of it is ours.
    """

    def __init__(self, given: WarmupSchedule | None, final_density: float) -> None:
        self._given, self._final_density = given, final_density
        self.settled_at: int | None = None
        self.measured: list[list[float]] = []

    @property
    def warmup(self) -> WarmupSchedule | None:
        """The schedule as far as it is known."""
        if self._given is None or self._given.until_settled is None or self.settled_at is None:
            return self._given
        return self._given.with_first_stage(self.settled_at, self._final_density)

    def go_on_from(self, other: Settling) -> None:
        """Have measured and decided what `other` has."""
        self.settled_at, self.measured = other.settled_at, list(other.measured)

    def is_due(self, steps: int) -> bool:
        """Whether the second moment is to be measured after `steps` steps, the last of them dense; on every rank."""
        waits = self._given is not None and self._given.until_settled is not None and self.settled_at is None
        return waits and steps % INTERVAL == 0

    def judge(self, step: int, norm: float, rate: float, window: float) -> list[float]:
        """What the first rank tells all, itself too, see `take`.

        Args:
            step: number of Adam's steps, of which skipped ones are none, >= 1.
            norm: l1 norm of the second moment after them.
            rate: learning rate of the last of them.
            window: ``1/(1-b2)``, in steps.
        """
        assert self._given is not None and self._given.until_settled is not None
        settled = False
        before = self._a_window_before(step, window)
        if before is not None and step >= 2 * window:
            _, norm_then, rate_then = before
            low, high = sorted((norm, norm_then))
            close = 0 < high < math.inf and high <= (1 + self._given.until_settled) * low
            settled = close and rate <= rate_then
        return [step, norm, rate, window, settled]

    def take(self, told: Sequence[float], steps: int) -> None:
        """Go on as the first rank has told, after `steps` steps."""
        step, norm, rate, window, settled = told
        if settled:
            self.settled_at, self.measured = steps, []
            return
        oldest = self._a_window_before(step, window)
        kept = self.measured[self.measured.index(oldest) :] if oldest is not None else self.measured
        self.measured = [*kept, [step, norm, rate]]

    def _a_window_before(self, step: float, window: float) -> list[float] | None:
        """The last measurement that is at least a window old."""
        return next((each for each in reversed(self.measured) if each[0] <= step - window), None)
