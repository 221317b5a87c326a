"""When the weights have become others: the residuals of those before are worth nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("dgc_horovod")
_SKIPPED_AT_MOST = 100  # exchanges that a script may leave out between two


class Clock:
    """Notices that a checkpoint was loaded: it is told, or the optimizer's iterations jump.

    Args:
        stride: iterations from one exchange to the next, >= 1.
        says: function that tells whether to warn the user (on one rank).
    """

    def __init__(self, stride: int, says: Callable[[], bool]) -> None:
        self.stride, self._says = stride, says
        self._last: int | None = None
        self._generation = self._seen = 0

    def reloaded(self) -> None:
        """The optimizer's variables have been loaded."""
        self._generation += 1

    def resumed(self, iterations: int) -> int:
        """Weights, optimizer and residuals have been loaded together, at `iterations`; the generation that they are."""
        # as if their last step had been exchanged: local steps may exchange before the next one
        self._last, self._seen = iterations - 1, self._generation
        return self._generation

    def generation(self, iterations: int) -> int:
        """A number that changes when a checkpoint has been loaded. `iterations`: the optimizer's, at an exchange."""
        last, self._last = self._last, iterations
        if last is not None and not 0 <= iterations - last <= _SKIPPED_AT_MOST * self.stride:
            self._generation += 1
        if self._generation != self._seen or (last is None and iterations >= self.stride):
            self._seen = self._generation
            if self._says():
                _log.warning(
                    "dgc_horovod: a checkpoint was loaded, the optimizer is at iteration %d; u and v belong to the "
                    "weights before, and start from zero",
                    iterations,
                )
        return self._generation
