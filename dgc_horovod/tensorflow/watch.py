"""Ends a wait that nobody will answer: TensorFlow's collectives cannot be polled, as torch's can.

One thread a process looks at the deadlines of all that wait. When a time is over it shuts Horovod down: every pending
operation then fails, on every rank that is still alive.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref

import horovod.tensorflow as hvd

from dgc_horovod import envvars
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.report import timed_out

_log = logging.getLogger("dgc_horovod")
_LOOK_EVERY = 0.25  # seconds
_SHUTDOWN_LASTS = 60.0  # seconds at most that the end of the process waits for a shutdown under way


class Watch:
    """The clock of one user of collectives.

    Args:
        rank, workers: who waits, among how many.
    """

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self.timeout = envvars.timeout_seconds()
        self.deadline: float | None = None
        self.what = ""
        self.error: CollectiveTimeout | None = None

    def arm(self, what: str) -> None:
        """From now on the clock runs, for `what`."""
        if self.workers > 1:
            self.what, self.deadline = what, time.monotonic() + self.timeout
            _watcher.look_after(self)

    def disarm(self) -> None:
        """It has come."""
        self.deadline = None


class _Watcher:
    """The thread, and the clocks that it looks at."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._ending = False

    def look_after(self, watch: Watch) -> None:
        """Look at `watch` from now on."""
        self._watches.add(watch)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="dgc-watch", daemon=True)
            self._thread.start()
            # Horovod shuts itself down at exit; two of these at once would wait for each other
            atexit.register(self._wait_for_shutdown)

    def _wait_for_shutdown(self) -> None:
        if self._ending and self._thread is not None:
            self._thread.join(_SHUTDOWN_LASTS)

    def _look(self) -> None:
        self._ending = False
        while not self._ending:
            time.sleep(_LOOK_EVERY)
            now = time.monotonic()
            late = [watch for watch in list(self._watches) if watch.deadline is not None and now > watch.deadline]
            for watch in late:
                text = timed_out(watch.rank, watch.workers, watch.what, watch.timeout)
                watch.error, watch.deadline = CollectiveTimeout(text), None
                _log.error("dgc_horovod: CollectiveTimeout: %s. Shutting Horovod down", text)
            if late:
                self._ending = True
                hvd.shutdown()


_watcher = _Watcher()
