"""What a job that ends tells of itself where it was not as sound as it may look; without it nobody would know."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dgc_horovod.stats import PROCESS, total

_log = logging.getLogger("dgc_horovod")
_NORMAL = 0.01  # of all steps may be skipped without a warning: a loss scaler looks for the largest scale


def pending() -> int:
    """Number of local steps that no exchange has followed, when the job ends; of several optimizers the most."""
    for counts in PROCESS.exchanges:
        counts.close()
    return max((counts.pending for counts in PROCESS.exchanges), default=0)


def skipped(stats: Mapping[str, float]) -> str:
    """How many of all steps, or exchanges, were applied on no rank; "" if all were applied.

    Args:
        stats: counters of all exchanges together, see `stats.total`.
    """
    count, steps = stats["skipped"], stats["steps"]
    return f"skipped {count:,} of {steps:,} (applied on no rank)" if count else ""


def warnings(ranks: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """What else is to be said of the run; nothing where it was sound.

    Args:
        ranks: what each rank tells of itself, see `recording.rank_figures`.
    """
    left, checks, found = pending(), PROCESS.replica_checks, []
    if checks.differed:
        found.append(f"the ranks' weights differed at {checks.differed:,} of {checks.made:,} comparisons")
    found += [
        f"rank {each['rank']} left out {each['left_out']:,} of its local steps, whose gradient was not finite"
        for each in ranks
        if each.get("left_out")
    ]
    if left:
        found.append(
            f"local steps at the end that were not exchanged: {left}. The ranks' weights differ: call "
            "optimizer.exchange() before evaluating or saving"
        )
    return found


def watch(rank: int) -> None:
    """Warn on rank 0 when this process ends, unless it ends by an error; once for all optimizers."""
    if rank == 0 and not PROCESS.tells_at_end:
        PROCESS.tells_at_end = True
        atexit.register(_at_exit, os.getpid())


def _at_exit(process: int) -> None:
    if os.getpid() != process or getattr(sys, "last_value", None) is not None:  # forked, or ended by an error
        return
    stats = total(list(PROCESS.exchanges))
    texts = [skipped(stats)] if stats["skipped"] > _NORMAL * stats["steps"] else []
    for text in [*texts, *warnings()]:
        _log.warning("dgc_horovod: %s", text)
