"""A job that ends within a round of local steps: its ranks' weights differ, which its user is told."""

from __future__ import annotations

import atexit
import logging
import os
import sys

from dgc_horovod.stats import all_exchanges

_log = logging.getLogger("dgc_horovod")
_watched_by: set[int] = set()  # processes, by number: one that was forked inherits the handlers of its parent


def pending() -> int:
    """Number of local steps that no exchange has followed, when the job ends; of several optimizers the most."""
    for counts in all_exchanges:
        counts.close()
    return max((counts.pending for counts in all_exchanges), default=0)


def warning(steps: int) -> str:
    """What is said of them; "" if there are none."""
    if not steps:
        return ""
    return (
        f"local steps at the end that were not exchanged: {steps}. The ranks' weights differ: call "
        "optimizer.exchange() before evaluating or saving"
    )


def watch(rank: int) -> None:
    """Warn of them on rank 0 when this process ends, unless it ends by an error; once for all optimizers."""
    if rank == 0 and not _watched_by:
        _watched_by.add(os.getpid())
        atexit.register(_at_exit)


def leave_to_summary() -> None:
    """The line at the end of the job tells of them."""
    _watched_by.clear()
    _watched_by.add(0)  # no process


def _at_exit() -> None:
    text = warning(pending()) if os.getpid() in _watched_by and getattr(sys, "last_value", None) is None else ""
    if text:
        _log.warning("dgc_horovod: %s", text)
