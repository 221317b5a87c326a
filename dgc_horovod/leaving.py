"""How a process leaves: at once where it must, and with warnings of a run that was less sound than it looks."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from dgc_horovod.stats import PROCESS, total

SHUTDOWN_SECONDS = 2.0  # of ranks that all answer it takes milliseconds
_HANDLERS_SECONDS = 4.0
has_given_up = threading.Event()  # set once this process has waited in vain


def without_others(horovod: ModuleType) -> None:
    """From now on neither Horovod's shutdown nor the end of this process waits for other ranks.

    Both need an answer of every rank, also at exit and then in a destructor of Horovod's library. One that is frozen
    gives none: that is 30 s over Gloo, and for ever over MPI. All else stays: what a script does with the error, exit
    handlers, the exit code.

    Args:
        horovod: Horovod's module of a framework.
    """
    if has_given_up.is_set():
        return
    has_given_up.set()
    library = horovod.mpi_ops._basics.MPI_LIB_CTYPES
    library.horovod_shutdown = functools.partial(within, SHUTDOWN_SECONDS, library.horovod_shutdown)
    atexit.unregister(horovod.mpi_ops._basics.shutdown)
    c = ctypes.CDLL(None)
    if hasattr(c, "on_exit"):  # glibc's: a handler that is given the exit code; what is registered last runs first
        c.on_exit(c._exit, None)
        c.__cxa_atexit(c.fflush, None, None)  # of all files that libraries in C have open


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether `work` is done within `seconds`; if not, a thread of its own goes on with it."""
    thread = threading.Thread(target=work, name="dgc-leaving", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def end_now() -> None:
    """End this process, whose other threads wait for ever, with exit code 1, after its exit handlers."""
    within(_HANDLERS_SECONDS, atexit._run_exitfuncs)
    within(1.0, _flush)
    os._exit(1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


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
