"""Ends a wait that nobody will answer: TensorFlow's collectives cannot be polled, as torch's can.

One thread a process looks at the deadlines of all that wait. When a time is over it shuts Horovod down: every pending
operation then fails, on every rank that is still alive. A rank that is frozen keeps Horovod from that, and the
operation from returning: then the process ends.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.tensorflow as hvd
import tensorflow as tf

from dgc_horovod import envvars, leaving
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.notices import timed_out

_log = logging.getLogger("dgc_horovod")
_LOOK_EVERY = 0.25  # seconds
_SHUTDOWN_LASTS = 60.0  # seconds at most that the end of the process waits for a shutdown under way


class Watch:
    """The clock of one user of collectives on `process_set`; `timeout` in seconds, None: DGC_TIMEOUT."""

    def __init__(self, process_set: hvd.ProcessSet, timeout: float | None = None) -> None:
        self.process_set = process_set
        self.rank, self._workers = process_set.rank(), process_set.size()
        self.timeout = timeout or envvars.timeout_seconds()
        self.deadline: float | None = None
        self.what = ""
        self.error: CollectiveTimeout | None = None

    @property
    def workers(self) -> int:
        """N; asked anew in an elastic job only: a set of one rank goes on when the others have shut Horovod down."""
        return self.process_set.size() if envvars.horovod_elastic() else self._workers

    def arm(self, what: str) -> None:
        """From now on the clock runs, for `what`: all that this rank has to give has been given."""
        self.error = None
        if self.workers > 1:
            self.what, self.deadline = what, time.monotonic() + self.timeout
            _watcher.look_after(self)

    def disarm(self) -> None:
        """It has come, or is waited for no more."""
        self.deadline = None

    def expire(self) -> None:
        """The time is over."""
        text = timed_out(self.rank, self._workers, self.what, self.timeout)
        self.error, self.deadline = CollectiveTimeout(text), None
        _log.error("dgc_horovod: CollectiveTimeout: %s. Shutting Horovod down", self.error)


@contextmanager
def watched(process_set: hvd.ProcessSet, what: str, timeout: float | None = None) -> Iterator[None]:
    """Around operations that block, in eager mode.

    Raises:
        CollectiveTimeout: they did not end within `timeout` seconds (None: DGC_TIMEOUT).
    """
    watch = Watch(process_set, timeout)
    watch.arm(what)
    try:
        yield
    except (tf.errors.OpError, ValueError) as error:  # ValueError: Horovod is not initialized any more
        raise watch.error or error from None
    finally:
        watch.disarm()


class _Watcher:
    """The thread, and the clocks that it looks at."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._lock = threading.Lock()  # steps of several threads arm their clocks

    def look_after(self, watch: Watch) -> None:
        """Look at `watch` from now on."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None or not self._thread.is_alive():
                self._ending = False
                self._thread = threading.Thread(target=self._look, name="dgc-watch", daemon=True)
                self._thread.start()

    def wait_for_shutdown(self) -> None:
        """See the function of this name."""
        if self._ending and self._thread is not None and not leaving.has_given_up.is_set():
            self._thread.join(_SHUTDOWN_LASTS)

    def _look(self) -> None:
        while not self._ending:
            time.sleep(_LOOK_EVERY)
            now = time.monotonic()
            with self._lock:  # no list of all that outlives a look: it would keep each of them alive until the next
                late = [w for w in self._watches if (deadline := w.deadline) is not None and now > deadline]
            for watch in late:
                watch.expire()
            if late:
                self._ending = True
                # At exit Horovod shuts itself down, and of two that join its thread at once one waits for ever. What is
                # registered last runs first, and every hvd.init() registers: not before now.
                atexit.unregister(self.wait_for_shutdown)
                atexit.register(self.wait_for_shutdown)
                self._shut_down()

    def _shut_down(self) -> None:
        if envvars.horovod_elastic():  # whose ranks go on
            hvd.shutdown()
            return
        if not leaving.within(leaving.SHUTDOWN_SECONDS, hvd.shutdown):
            _log.error(
                "dgc_horovod: another rank does not answer any more, and TensorFlow waits for it: the process ends"
            )
            leaving.without_others(hvd)
            leaving.end_now()


_watcher = _Watcher()


def wait_for_shutdown() -> None:
    """Until a shutdown that was begun when a time was over is done; nothing, if there is none."""
    _watcher.wait_for_shutdown()
