"""What is said while a run goes on, once, where a figure leaves the range in which compression was seen to be sound.

docs/tuning.md has for each what it means and what to do.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dgc_horovod.stats import PROCESS

_log = logging.getLogger("dgc_horovod")
_PAGE = "docs/tuning.md#while-it-runs"
FEW_STEPS = 50  # of which nothing is said yet
MOST_LOST = 0.25  # of a step, in which the others wait for the slowest rank
# After the density warm-up. Sound runs stay below (`python -m benchmarks.quality.health`)
MOST_WAITING = 100.0  # norm of the residual in that of the gradient, times the root of the density
MOST_STALE = 10.0  # steps that 99% of what is sent waited, times the density
MOST_OVERLAP = 0.1  # of the ranks' selections, beyond the density, which chance alone gives
LOOKS = 5  # in a row: a gradient may be small once


def tell(found: Mapping[str, str]) -> None:
    """Log what has not been said yet. For rank 0.

    Args:
        found: texts by kind, of which each is said once.
    """
    for kind, text in found.items():
        if kind not in PROCESS.advice:
            PROCESS.advice[kind] = text
            _log.warning("dgc_horovod: %s (%s)", text, _PAGE)


def given() -> list[str]:
    """All that was said."""
    return list(PROCESS.advice.values())


class Compression:
    """What is to be said of how one optimizer's gradients are compressed, once several looks in a row agree on it."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def on(self, figures: Mapping[str, float], density: float) -> dict[str, str]:
        """What is to be said after another look.

        Args:
            figures: figures of a step after the density warm-up, see `Diagnostics.close`; with ``staleness_99``.
            density: fraction of the elements that is sent, in (0, 1].
        """
        found = _outside(figures, density)
        self._in_a_row = {kind: self._in_a_row.get(kind, 0) + 1 for kind in found}
        return {kind: text for kind, text in found.items() if self._in_a_row[kind] >= LOOKS}


def _outside(figures: Mapping[str, float], density: float) -> dict[str, str]:
    """What has left the range, by kind."""
    found = {}
    ratio, waited = figures.get("residual_ratio", 0.0), figures.get("staleness_99", 0.0)
    if ratio * math.sqrt(density) > MOST_WAITING:
        most = MOST_WAITING / math.sqrt(density)
        found["residual"] = f"{ratio:.0f} times a gradient waits on a rank; sound runs stay below {most:.0f} here"
    if waited * density > MOST_STALE:
        found["staleness"] = (
            f"1% of what is sent has waited for more than {waited:.0f} steps; sound runs stay below "
            f"{MOST_STALE / density:.0f} here"
        )
    if figures.get("overlap", 0.0) > MOST_OVERLAP + density:
        found["overlap"] = (
            f"{figures['overlap']:.0%} of what a rank sends another one sends as well; sound runs stay below "
            f"{MOST_OVERLAP + density:.0%} here"
        )
    return found


class Straggler:
    """The rank that waits least for the others, and what that costs them.

    Seconds of waiting hold the transfer itself too, which all ranks have alike: only differences are looked at.

    Args:
        ranks: what each rank tells of itself, see `recording.rank_figures`; at least one.

    Attributes:
        figures: what the slowest rank tells.
        lost: mean seconds of a step in which a rank of the others waits for it.
        share: `lost` in the length of a step.
    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.figures = min(ranks, key=waiting)
        others = [waiting(figures) for figures in ranks if figures is not self.figures]
        self.lost = statistics.mean(others) - waiting(self.figures) if others else 0.0
        step = statistics.mean(figures["step_seconds"] / max(1, figures["timed_steps"]) for figures in ranks)
        self.share = min(1.0, self.lost / step) if step else 0.0

    @property
    def notable(self) -> bool:
        """Whether it costs so much that something should be done."""
        return self.share > MOST_LOST


def waiting(figures: Mapping[str, Any]) -> float:
    """Seconds of a step in which a rank waits."""
    return float(figures["wait_seconds"]) / max(1, figures["timed_steps"])


def on_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What is to be said of the differences between ranks."""
    if len(ranks) < 2 or min(figures["timed_steps"] for figures in ranks) < FEW_STEPS:
        return {}
    slowest = Straggler(ranks)
    if not slowest.notable:
        return {}
    rank, host = slowest.figures["rank"], slowest.figures["host"]
    return {
        "straggler": f"rank {rank} ({host}) is slow: the others wait for it {1000 * slowest.lost:.0f} ms of every "
        f"step, {slowest.share:.0%} of their time"
    }
