"""The metrics file of a run: a record of rank 0's counters every ten seconds, and one more at the end.

Under `dgcrun` it begins with ``hvd.init()``, and has figures of the other ranks; in a script that imports dgc_horovod
itself it begins with the first compressed optimizer or tape. A process writes one such file.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dgc_horovod import __version__, advice, at_end, envvars, files, stats, tools
from dgc_horovod.compression import method_of
from dgc_horovod.config import AUTO, DGCConfig
from dgc_horovod.errors import ConfigError
from dgc_horovod.notices import make_visible
from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.stats import PROCESS, ExchangeStats

_log = logging.getLogger("dgc_horovod")
EVERY = 10.0  # seconds
_OFTEN = 500  # records while a run lasts e times as long
RANKS_KEPT = 32  # in a record: the ranks that wait least for the others, and those that wait most
MLFLOW = "mlflow:"
Record = Mapping[str, Any]  # numbers and texts by name; of buckets and of ranks a list
RanksOf = Callable[[], Sequence[Mapping[str, Any]]]


def rank_figures(rank: int) -> dict[str, Any]:
    """Return the figures of a rank: times of all its exchanges, figures of the last step that was examined, and the
    number of local steps that it skipped.
    """
    tallies = list(PROCESS.exchanges)
    told = {"rank": rank, "host": socket.gethostname()[:64], **stats.times(tallies), **stats.figures(tallies)}
    return {**told, "left_out": sum(counts.left_out for counts in tallies)}


def bounded(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the figures of at most `RANKS_KEPT` ranks: those that wait least, one of which may be slow, and those that
    wait most; in the order of ranks.
    """
    if len(ranks) > RANKS_KEPT:
        by_wait = sorted(ranks, key=lambda figures: figures["wait_seconds"])
        ranks = [*by_wait[: RANKS_KEPT // 2], *by_wait[-RANKS_KEPT // 2 :]]
    return sorted(ranks, key=lambda figures: figures["rank"])


def choice(tallies: Sequence[ExchangeStats]) -> dict[str, Any]:
    """Return the state of a job that chooses its exchange (`planning.trial`); of several exchanges, of the largest.

    Returns:
        ``mode``, `DENSE` or `COMPRESSED`; ``trial_seconds``, see `ExchangeStats`; ``stock_steps``:
        number of the steps of stock Horovod's exchange, which is `DENSE`. Empty if none chooses.
    """
    # an exchange that has compressed without a choice was asked for by the script
    found = [counts for counts in tallies if counts.mode or not counts.offered]
    if not found:
        return {}
    largest = max(found, key=lambda counts: counts.elements)
    stock = sum(steps for counts in found for mode, steps in dict(counts.steps_of).items() if mode != COMPRESSED)
    return {"mode": largest.mode or DENSE, "trial_seconds": dict(largest.trial_seconds), "stock_steps": stock}


class Writer:
    """Destination of the records."""

    def write(self, record: Record) -> None:
        """Add a record, or replace the one before."""
        raise NotImplementedError

    def close(self) -> None:
        """End: no more records will come."""


def writer_for(path: str) -> Writer:
    """Return the writer for `path`, by its ending.

    Args:
        path: path of the metrics; ``*.prom``: text format of Prometheus' node exporter, replaced at every write (extra
            ``dgc-horovod[prometheus]``); ``*/``: folder for TensorBoard (extra ``dgc-horovod[tensorboard]``);
            ``mlflow:EXPERIMENT``: a run in MLflow (package mlflow), wherever its own settings say; any other: JSON
            lines.

    Raises:
        ConfigError: the extra is not installed.
    """
    if is_json_lines(path):
        return JsonLines(path)
    sink: Writer = tools.load("sinks").sink_for(path)
    return sink


def is_json_lines(path: str) -> bool:
    """Whether `writer_for` writes JSON lines there."""
    return not (path.startswith(MLFLOW) or path.endswith((".prom", "/")))


class JsonLines(Writer):
    """A line of JSON for each record; fewer as the run goes on, if records have its length in ``seconds``.

    The next line comes after a 500th of that time at the earliest: ``500 * (1 + ln(T / 5000))`` lines of a record
    every ten seconds for T > 5,000 s, 2,900 in a week.
    """

    def __init__(self, path: str) -> None:
        self._path, self._next = Path(path).absolute(), 0.0  # a script may change its folder

    def write(self, record: Record) -> None:
        """Add a line, with the time if the record has none."""
        seconds = record.get("seconds", self._next)
        if seconds < self._next and not record.get("final"):
            return
        self._next = seconds * (1 + 1 / _OFTEN)
        line = json.dumps({"time": round(time.time(), 3), **record}) + "\n"
        data = (b"\n" if _ends_within_a_line(self._path) else b"") + line.encode()
        files.append(self._path, data)


def _ends_within_a_line(path: Path) -> bool:
    """Whether the last line of a file was cut off: a job was killed, or the disk was full."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class Recording:
    """The file of this process, until `end`.

    Args:
        path: path of the metrics, see `writer_for`.
        method: name of the compression method, for the records.
        run: description of the job, as JSON, for the first record; its ``id`` stands in every one, by which a reader
            tells it from other jobs that write to the same file.
        ranks_of: function that returns the latest figures of every rank.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str, method: str, run: Mapping[str, Any], ranks_of: RanksOf) -> None:
        self._path, self._method, self._ranks_of = path, method, ranks_of
        self._id = run.get("id") or secrets.token_hex(8)
        self._start, self._process = time.monotonic(), os.getpid()
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._told = False
        try:
            self._writer: Writer = writer_for(path)
            self._write(False, {"run": run} if run else {})
        except OSError as error:
            raise ConfigError(f"the metrics file {path!r} cannot be written: {error}") from None
        threading.Thread(target=self._write_on, name="dgc-metrics", daemon=True).start()

    def end(self) -> None:
        """Write the last record; a second call does nothing, nor one in a forked child."""
        if os.getpid() == self._process and not self._ended.is_set():
            self._ended.set()
            self._try(final=True)

    def _write_on(self) -> None:
        while not self._ended.wait(EVERY):
            self._try(final=False)

    def _try(self, final: bool) -> None:
        try:
            with self._writing:
                if final or not self._ended.is_set():
                    self._write(final, {})
        except OSError as error:
            if not self._told:
                self._told = True
                make_visible()
                _log.warning("dgc_horovod: the metrics file %r cannot be written any more: %s", self._path, error)

    def _write(self, final: bool, more: Mapping[str, Any]) -> None:
        tallies = list(PROCESS.exchanges)
        record = {
            "id": self._id,
            "seconds": round(time.monotonic() - self._start, 3),
            "version": __version__,
            "method": self._method,
            "final": final,
            **stats.total(tallies),
            **stats.figures(tallies),
            **(choice(tallies) if self._method == AUTO else {}),
            "replica_checks": PROCESS.replica_checks.made,
            "replica_mismatches": PROCESS.replica_checks.differed,
            "skips": stats.skips(tallies),
            "advice": advice.given(),
            "buckets": stats.bucket_stats(tallies),
            "ranks": bounded(self._ranks_of()),
            **more,
        }
        self._writer.write(record)
        if final:
            self._writer.close()


def begin(path: str, method: str, run: Mapping[str, Any] | None = None, ranks_of: RanksOf | None = None) -> Recording:
    """Begin the recording of this process, which has none yet (`Process.is_recorded`).

    Args:
        path, method, run, ranks_of: see `Recording`; without the last, it has the figures of this rank alone.

    Raises:
        ConfigError: see `Recording`.
    """
    found = Recording(path, method, run or {}, ranks_of or (lambda: [rank_figures(0)]))
    PROCESS.is_recorded = True
    return found


def begin_as_environment_says(config: DGCConfig) -> None:
    """Begin the recording of a script that has made a compressed optimizer, if ``DGC_METRICS_FILE`` is set; on rank 0.

    Warnings at the end of the process are given in any case.

    Args:
        config: compression settings of the optimizer.

    Raises:
        ConfigError: the file cannot be written.
    """
    at_end.watch(0, config)
    path = envvars.value(envvars.METRICS_FILE)
    if path and not PROCESS.is_recorded:
        atexit.register(begin(path, method_of(config)).end)
