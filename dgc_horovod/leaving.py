"""The end of a process whose wait for another rank has timed out: it does not wait for that rank again."""

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
has_given_up = threading.Event()  # set after a wait of this process has timed out


def without_others(horovod: ModuleType) -> None:
    """Let neither Horovod's shutdown nor the end of this process wait for other ranks from now on.

    Both need an answer of every rank, also at exit and then in a destructor of Horovod's library. A frozen rank gives
    none: they would wait 30 s over Gloo, and for ever over MPI. The script's handling of the error, exit handlers and
    the exit code stay as they are.

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
    if hasattr(c, "on_exit"):  # glibc's: a handler that gets the exit code; the last one registered runs first
        c.on_exit(c._exit, None)
        c.__cxa_atexit(c.fflush, None, None)  # of all files that libraries in C have open


def within(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a thread, and return whether it ends within `seconds`; if not, the thread goes on."""
    thread = threading.Thread(target=work, name="dgc-leaving", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def end_now() -> None:
    """End this process with exit code 1 after its exit handlers, although other threads wait for ever."""
    within(_HANDLERS_SECONDS, atexit._run_exitfuncs)
    within(1.0, _flush)
    os._exit(1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
