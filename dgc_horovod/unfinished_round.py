"""A job that ends within a round of local steps: its ranks' weights differ, which its user is told."""

from __future__ import annotations

import atexit
import logging
import os
import sys

from dgc_horovod.stats import all_exchanges

_log = logging.getLogger("dgc_horovod")
_is_told = False  # when this process ends


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
    global _is_told
    if rank == 0 and not _is_told:
        _is_told = True
        atexit.register(_at_exit, os.getpid())


def leave_to_summary() -> None:
    """The line at the end of the job tells of them."""
    global _is_told
    _is_told = True


def _at_exit(process: int) -> None:
    if os.getpid() != process or getattr(sys, "last_value", None) is not None:  # forked, or ended by an error
        return
    text = warning(pending())
    if text:
        _log.warning("dgc_horovod: %s", text)
