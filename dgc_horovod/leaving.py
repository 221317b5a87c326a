"""The end of a process that has waited for another rank in vain: it does not wait for that one again."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType

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
