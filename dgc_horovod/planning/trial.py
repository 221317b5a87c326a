"""The trials of ``auto``: which densities and exchanges are tried, and which one the clock chooses."""

from __future__ import annotations

import math
import statistics

from dgc_horovod.config import DGCConfig

# Number of times that an element is to be sent over a run: fewer lose more (docs/quality.md)
SENT = 20
LEAST = 0.001  # of Lin et al., arXiv 1712.01887, who have no lower one
# Runs that need a higher one are too short: the momentum of an element is often masked before the element is sent, and
# is lost (docs/quality.md, Short runs and long ones)
MOST = 0.01


def fitting(total_steps: int) -> float:
    """The smallest density at which an element is sent `SENT` times in a run: ``SENT / total_steps``, in [LEAST, 1].

    Args:
        total_steps: number of steps of the run, >= 1.
    """
    return min(1.0, max(LEAST, float(f"{SENT / total_steps:.2g}")))


def is_too_short(total_steps: int) -> bool:
    """Whether a run is so short that an element is sent `SENT` times only at a density above `MOST`."""
    return SENT > MOST * total_steps


def fitted(config: DGCConfig) -> DGCConfig:
    """`config` with the density that fits its ``total_steps``, where they are known."""
    return config if config.total_steps is None else config.replace(density=fitting(config.total_steps))


DENSE, COMPRESSED = "dense", "compressed"
SETTLING, TIMED = 5, 20  # steps after a change that are not timed, at least 1, and steps that are, at least
MOST_TIMED, _LEAST_SECONDS = 100, 1.0  # disturbances by other programs last some tenths of a second
GAIN = 0.95  # share of the dense step's time at which a compressed one counts as faster
_HOPEFUL = 1.1  # share of the dense step's time above which a predicted step is not tried
_CLOSE = 1.3  # ratio of times below which more steps are timed


class Trial:
    """Times the dense steps, then compressed ones if those are predicted to be faster, and takes the faster exchange.

    Attributes:
        mode: exchange of the steps to come, `DENSE` or `COMPRESSED`.
        ended: whether it stays.
        seconds: time of a step of each timed exchange, by mode: mean over the ranks of their medians.
    """

    def __init__(self) -> None:
        self.mode, self.ended = DENSE, False
        self.seconds: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._untimed, self._last, self._timed = SETTLING, 0.0, TIMED
        self._times: list[float] = []
        self._waits: list[float] = []

    def step_ended(self, now: float, waited: float) -> bool:
        """Count a step.

        Args:
            now: seconds on a monotonic clock.
            waited: seconds of this step in which this rank only waited for gradients, >= 0.

        Returns:
            Whether the ranks are to compare their times now: `own`, `times_more`, then `dense_timed` or `tried`.
        """
        if self.ended:
            return False
        self._untimed -= 1
        if self._untimed < 0:
            self._times.append(now - self._last)
            self._waits.append(waited)
        self._last = now
        return len(self._times) == self._timed

    def own(self) -> tuple[float, float]:
        """Return the median seconds of this rank's steps, and of its waits."""
        return statistics.median(self._times), statistics.median(self._waits)

    def times_more(self, seconds: float) -> bool:
        """Whether more steps are timed before a conclusion: if steps are short, unless the difference is clear.

        Args:
            seconds: mean over the ranks of the times so far, > 0.
        """
        wanted, dense = min(MOST_TIMED, math.ceil(_LEAST_SECONDS / seconds)), self.seconds.get(DENSE)
        is_plain = dense is not None and not 1 / _CLOSE < seconds / dense < _CLOSE
        if wanted <= self._timed or is_plain:
            return False
        self._timed = wanted
        return True

    def dense_timed(self, seconds: float, predicted: float | None) -> None:
        """Note the time of the dense steps, and try compression unless it is predicted to be slower.

        Args:
            seconds: mean over the ranks of a dense step's time, > 0.
            predicted: seconds of a compressed step, the same on every rank; None: it cannot be compressed.
        """
        self.seconds[DENSE] = seconds
        if predicted is not None and predicted <= _HOPEFUL * seconds:
            self.mode = COMPRESSED
            self._begin()
        else:
            self.stay()

    def tried(self, seconds: float) -> None:
        """Note the time of the compressed steps, mean over the ranks, > 0, and choose."""
        self.seconds[COMPRESSED] = seconds
        self.stay(COMPRESSED if seconds <= GAIN * self.seconds[DENSE] else DENSE)

    def stay(self, mode: str | None = None) -> None:
        """End the trial with `mode`, or with the present one."""
        self.mode, self.ended = mode or self.mode, True
