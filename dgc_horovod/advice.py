"""Warnings during a run: each once, when a figure leaves the range of runs in which compression was sound.

docs/tuning.md explains each of them, and what to do.
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
FEW_STEPS = 50  # before which no wait is judged
MOST_LOST = 0.25  # share of a step in which the others wait for the slowest rank
# After the density warm-up. Sound runs stay below (`python -m benchmarks.quality.health`)
MOST_WAITING = 100.0  # norm of the residual over that of the gradient, times the root of the density
MOST_STALE = 10.0  # steps within which 99% of the sent elements were sent before, times the density
MOST_OVERLAP = 0.1  # overlap of the ranks' selections above the density, which chance alone gives
LOOKS = 5  # examinations in a row: a gradient may be small once


def tell(found: Mapping[str, str]) -> None:
    """Log warnings that were not given yet. For rank 0.

    Args:
        found: texts by kind; each kind is logged once.
    """
    for kind, text in found.items():
        if kind not in PROCESS.advice:
            PROCESS.advice[kind] = text
            _log.warning("dgc_horovod: %s (%s)", text, _PAGE)


def given() -> list[str]:
    """Return all warnings that were given."""
    return list(PROCESS.advice.values())


class Compression:
    """Warnings on the compression of one optimizer's gradients, after several examinations in a row that agree."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def on(self, figures: Mapping[str, float], density: float) -> dict[str, str]:
        """Return the warnings after another examination.

        Args:
            figures: figures of a step after the density warm-up, see `Diagnostics.close`; with ``staleness_99``.
            density: fraction of the elements that is sent, in (0, 1].
        """
        found = _outside(figures, density)
        self._in_a_row = {kind: self._in_a_row.get(kind, 0) + 1 for kind in found}
        return {kind: text for kind, text in found.items() if self._in_a_row[kind] >= LOOKS}


def _outside(figures: Mapping[str, float], density: float) -> dict[str, str]:
    """Return a text for each figure outside its range, by kind."""
    found = {}
    ratio, waited = figures.get("residual_ratio", 0.0), figures.get("staleness_99", 0.0)
    if ratio * math.sqrt(density) > MOST_WAITING:
        most = MOST_WAITING / math.sqrt(density)
        found["residual"] = (
            f"the norm of the residual is {ratio:.0f} times that of the gradient; sound runs stay below {most:.0f}"
        )
    if waited * density > MOST_STALE:
        found["staleness"] = (
            f"1% of the sent elements have waited for more than {waited:.0f} steps; sound runs stay below "
            f"{MOST_STALE / density:.0f}"
        )
    if figures.get("overlap", 0.0) > MOST_OVERLAP + density:
        found["overlap"] = (
            f"{figures['overlap']:.0%} of the elements that a rank sends are sent by another one as well; sound runs "
            f"stay below {MOST_OVERLAP + density:.0%}"
        )
    return found


class Straggler:
    """The rank that waits least for the others, and the time that it costs them.

    Seconds of waiting include the transfer itself, which is the same on all ranks: only differences are compared.

    Args:
        ranks: figures of each rank, see `recording.rank_figures`; at least one.

    Attributes:
        figures: those of the slowest rank.
        place: its index in `ranks`.
        lost: mean seconds of a step in which a rank of the others waits for it.
        share: `lost` in the length of a step.
    """

    def __init__(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        waits = [float(figures["wait_seconds"]) / max(1, figures["timed_steps"]) for figures in ranks]  # of a step
        least = min(waits)
        self.place = waits.index(least)
        self.figures = ranks[self.place]
        others = waits[: self.place] + waits[self.place + 1 :]
        self.lost = statistics.mean(others) - least if others else 0.0
        step = statistics.mean(figures["step_seconds"] / max(1, figures["timed_steps"]) for figures in ranks)
        self.share = min(1.0, self.lost / step) if step else 0.0

    @property
    def notable(self) -> bool:
        """Whether it costs so much that the user should be told."""
        return self.share > MOST_LOST


def on_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the warning on a slow rank, if there is one."""
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
