"""The end of a step that is not applied: its cause, and whether the sent elements are rolled back or dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dgc_horovod.core.engine import BucketEngine

# Reported in place of the ranks whose gradient was not finite
LEFT_OUT, TRIED_AGAIN = "no rank: an update was too large", "no rank: an update times the loss scale was too large"
WEIGHTS = "the weights of "  # followed by a name: weights that are not finite, and make all gradients not finite
IN_A_ROW = 3  # steps in a row with an update that is too large, after which the residual is emptied


def unscaled() -> float:
    """The loss scale without a GradScaler."""
    return 1.0


class Ending:
    """Distinguishes a gradient that is not finite from an update that is too large for its dtype.

    After a gradient that is not finite the sent elements are rolled back. An update that is too large is dropped:
    rolled back, it would be sent and be too large again at every step. It is rolled back only while the loss scale
    falls, which may make it fit. If updates are too large in `IN_A_ROW` steps, u and v are emptied.

    Args:
        engines: engines of the optimizer.

    Attributes:
        spoilt: function that an adapter sets; it returns the name of a variable whose weights are not finite, or "". It
            is called only if a gradient was not finite.
    """

    def __init__(self, engines: Sequence[BucketEngine]) -> None:
        self._engines = engines
        self._too_large = self._spoilt = ""
        self._scale, self._in_a_row = math.inf, 0
        self.spoilt: Callable[[], str] = str

    def begin(self) -> None:
        """Begin a step."""
        self._too_large = self._spoilt = ""

    def judge(
        self, updates_finite: bool, dense_finite: bool = True, loss_scale: Callable[[], float] = unscaled
    ) -> bool:
        """Return whether the step may be applied; the same on every rank, as updates and flags are.

        Args:
            updates_finite: whether the update of every bucket is finite in its own dtype, as far as its packets were.
            dense_finite: whether the results of the dense path are finite.
            loss_scale: function that returns the factor of the gradients and updates, > 0.
        """
        found = [engine.outcome for engine in self._engines]
        gradients_finite = dense_finite and all(outcome.finite for outcome in found)
        if updates_finite or not gradients_finite:
            self._scale, self._in_a_row = math.inf, 0
            applied = updates_finite and dense_finite
            self._spoilt = "" if applied else self.spoilt()
            return applied
        scale = 1.0 if any(outcome.overflowed for outcome in found) else loss_scale()
        if 1 < scale < self._scale:
            self._too_large, self._scale = TRIED_AGAIN, scale
        else:
            self._too_large, self._in_a_row = LEFT_OUT, self._in_a_row + 1
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether the sent elements of this step are dropped, not rolled back."""
        return self._too_large == LEFT_OUT

    @property
    def empties(self) -> bool:
        """Whether u and v are emptied as well."""
        return self.leaves_out and self._in_a_row >= IN_A_ROW

    def where(self) -> str:
        """Describe where a gradient of the last step was not finite; the same on ranks with the same weights."""
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
        nodes = sorted({rank // size for rank in ranks})  # workers of a node have averaged their gradients
        return "; ".join(f"one of ranks {n * size} to {(n + 1) * size - 1}" for n in nodes) + f", among {among}"
