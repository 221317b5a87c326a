"""The metrics file of a run: a record of rank 0's counters every ten seconds, and one more at the end.

Under `dgcrun` it begins with ``hvd.init()``; in a script that imports dgc_horovod itself, with its first compressed
optimizer or tape. One process has one such file.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time

from dgc_horovod import __version__, envvars
from dgc_horovod.compression import method_of
from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import ConfigError
from dgc_horovod.metrics import Writer, writer_for
from dgc_horovod.notices import make_visible
from dgc_horovod.stats import all_exchanges, bucket_stats, total

_log = logging.getLogger("dgc_horovod")
_EVERY = 10.0  # seconds
_current: Recording | None = None


class Recording:
    """The file of this process, until `end`.

    Args:
        path: path of the metrics, see `metrics.writer_for`.
        method: name of the compression method, for the records.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str, method: str) -> None:
        self._path, self._method = path, method
        self._start, self._process = time.monotonic(), os.getpid()
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._told = False
        try:
            self._writer: Writer = writer_for(path)
            self._write(final=False)
        except OSError as error:
            raise ConfigError(f"the metrics file {path!r} cannot be written: {error}") from None
        threading.Thread(target=self._write_on, name="dgc-metrics", daemon=True).start()

    def end(self) -> None:
        """Write the last record; a second call does nothing, nor one in a forked child."""
        if os.getpid() == self._process and not self._ended.is_set():
            self._ended.set()
            self._try(final=True)

    def _write_on(self) -> None:
        while not self._ended.wait(_EVERY):
            self._try(final=False)

    def _try(self, final: bool) -> None:
        try:
            with self._writing:
                if final or not self._ended.is_set():
                    self._write(final)
        except OSError as error:
            if not self._told:
                self._told = True
                make_visible()
                _log.warning("dgc_horovod: the metrics file %r cannot be written any more: %s", self._path, error)

    def _write(self, final: bool) -> None:
        record = {
            "seconds": round(time.monotonic() - self._start, 3),
            "version": __version__,
            "method": self._method,
            "final": final,
            **total(list(all_exchanges)),
            "buckets": bucket_stats(list(all_exchanges)),
        }
        self._writer.write(record)
        if final:
            self._writer.close()


def begin(path: str, method: str) -> Recording:
    """The recording of this process, begun now if it was not. Raises ConfigError as `Recording` does."""
    global _current
    if _current is None:
        _current = Recording(path, method)
    return _current


def begin_as_environment_says(config: DGCConfig) -> None:
    """Begin for a script that has made a compressed optimizer, if ``DGC_METRICS_FILE`` is set; for rank 0 to call.

    Args:
        config: compression settings of the optimizer.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = envvars.METRICS_FILE.read()
    if path and _current is None:
        atexit.register(begin(path, method_of(config)).end)
