"""The trials of ``auto``: which densities and exchanges are tried, and which one the clock chooses."""

from __future__ import annotations

import math
import statistics

from dgc_horovod.config import DGCConfig

# How often a coordinate is to be sent over a run: fewer lose more (docs/quality.md)
SENT = 20
LEAST = 0.001  # of Lin et al., arXiv 1712.01887, who have no lower one
# Runs that need a higher one are too short: masked, the momentum of an element seldom lasts until it is sent, and is
# lost (docs/quality.md, Short runs and long ones)
MOST = 0.01


def fitting(total_steps: int) -> float:
    """The smallest density at which a coordinate is sent `SENT` times in a run: ``SENT / total_steps``, in [LEAST, 1].

    Args:
        total_steps: number of steps of the run, >= 1.
    """
    return min(1.0, max(LEAST, float(f"{SENT / total_steps:.2g}")))


def is_too_short(total_steps: int) -> bool:
    """Whether a run is so short that a coordinate is sent often enough only at a density above `MOST`."""
    return SENT > MOST * total_steps


def fitted(config: DGCConfig) -> DGCConfig:
    """`config` with the density that fits its ``total_steps``, where they are known."""
    return config if config.total_steps is None else config.replace(density=fitting(config.total_steps))


DENSE, COMPRESSED = "dense", "compressed"
SETTLING, TIMED = 5, 20  # steps after a change that are not timed, at least 1, and steps that are, at least
MOST_TIMED, _LEAST_SECONDS = 100, 1.0  # what else happens on a machine lasts some tenths of a second
GAIN = 0.95  # of the dense step's time, or less, is faster
_HOPEFUL = 1.1  # of the dense step's time: what is expected to take more is not tried
_CLOSE = 1.3  # what is within this of another may turn out better


class Trial:
    """Times the dense steps, then compressed ones if those are predicted to be faster, and takes the faster exchange.

    Args:
        dense_steps: number of dense steps before those that are timed, >= 0.

    Attributes:
        mode: exchange of the steps to come, `DENSE` or `COMPRESSED`.
        ended: whether it stays.
        seconds: time of a step of each exchange that was timed, by mode, mean over the ranks of their medians.
    """

    def __init__(self, dense_steps: int = SETTLING) -> None:
        self.mode, self.ended = DENSE, False
        self.seconds: dict[str, float] = {}
        self._begin(dense_steps)

    def _begin(self, settling: int = SETTLING) -> None:
        self._untimed, self._last, self._timed = settling, 0.0, TIMED
        self._times: list[float] = []
        self._waits: list[float] = []

    def step_ended(self, now: float, waited: float) -> bool:
        """Count a step.

        Args:
            now: seconds on a clock that goes evenly.
            waited: seconds of this step in which nothing was left to do but wait for gradients, >= 0.

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
        """Median seconds of this rank's steps, and of those the seconds that it waited."""
        return statistics.median(self._times), statistics.median(self._waits)

    def times_more(self, seconds: float) -> bool:
        """Whether more steps are timed before anything is concluded: short ones, unless the answer is plain.

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
        """The dense steps are timed: try compression, unless that is expected to be slower.

        Args:
            seconds: mean over the ranks of a dense step's time, > 0.
            predicted: seconds of a compressed step, the same on every rank; None: there can be none.
        """
        self.seconds[DENSE] = seconds
        if predicted is not None and predicted <= _HOPEFUL * seconds:
            self.mode = COMPRESSED
            self._begin()
        else:
            self.stay()

    def tried(self, seconds: float) -> None:
        """The compressed steps are timed: their mean over the ranks, > 0."""
        self.seconds[COMPRESSED] = seconds
        self.stay(COMPRESSED if seconds <= GAIN * self.seconds[DENSE] else DENSE)

    def stay(self, mode: str | None = None) -> None:
        """End the trial with `mode`, or with the present one."""
        self.mode, self.ended = mode or self.mode, True
