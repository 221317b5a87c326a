"""When the weights have become others: the residuals of those before are worth nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("dgc_horovod")
_SKIPPED_AT_MOST = 100  # exchanges that a script may leave out between two


class Clock:
    """Notices that a checkpoint was loaded: it is told, or the optimizer's iterations jump.

    Args:
        stride: iterations from one exchange to the next, >= 1.
        says: function that tells whether to warn the user (on one rank).
        owner: the `Distribution` whose exchanges they are.
        grows: whether iterations grow with every step that is applied. A tape knows none, and local steps may have the
            same at two exchanges.
    """

    def __init__(self, stride: int, says: Callable[[], bool], owner: Any, grows: bool) -> None:
        self.stride, self._says = stride, says
        self._owner, self._grows = owner, grows
        self._last: int | None = None
        self._generation = self._seen = self._applied = 0
        self._again_at: int | None = None  # how many steps were applied when iterations had stayed

    def reloaded(self) -> None:
        """The optimizer's variables have been loaded: what is kept belongs to weights before, and ends here.

        A flush or a file may come before the next step, which takes over the optimizer's slots.
        """
        self._generation += 1
        self._owner.clear()
        for exchange in self._owner.exchanges:
            exchange.steps.take_over_again()

    def look(self, iterations: int) -> None:
        """The same, if the optimizer's iterations have jumped. Between two steps, before what is kept is used."""
        if self._jump_to(iterations):
            self.reloaded()

    def resumed(self, iterations: int) -> int:
        """Weights, optimizer and residuals have been loaded together, at `iterations`; the generation that they are."""
        # as if their last step had been exchanged: local steps may exchange before the next one
        self._last, self._seen = iterations - 1, self._generation
        return self._generation

    def generation(self, iterations: int) -> int:
        """A number that changes when a checkpoint has been loaded. `iterations`: the optimizer's, at an exchange."""
        applied = sum(each.steps.counts.steps - each.steps.counts.skipped for each in self._owner.exchanges)
        # a step that has failed is made again
        again = self._grows and iterations == self._last and applied > self._applied
        if again and self._again_at is not None and applied - self._again_at <= 2 * len(self._owner.exchanges):
            self._grows = again = False  # a script that sets iterations itself, at every step
        if again:
            self._again_at = applied
        if self._jump_to(iterations) or again:
            self._generation += 1
        last, self._last, self._applied = self._last, iterations, applied
        if self._generation != self._seen or (last is None and iterations >= self.stride):
            self._seen = self._generation
            if self._says():
                _log.warning(
                    "dgc_horovod: a checkpoint was loaded, the optimizer is at iteration %d; u and v belong to the "
                    "weights before, and start from zero",
                    iterations,
                )
        return self._generation

    def _jump_to(self, iterations: int) -> bool:
        return self._last is not None and not 0 <= iterations - self._last <= _SKIPPED_AT_MOST * self.stride
