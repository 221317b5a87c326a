"""The metrics file of a run: a record of rank 0's counters every ten seconds, and one more at the end.

Under `dgcrun` it begins with ``hvd.init()``, and has figures of the other ranks; in a script that imports dgc_horovod
itself it begins with the first compressed optimizer or tape. A process writes one such file.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dgc_horovod import __version__, advice, at_end, envvars, files, stats
from dgc_horovod.compression import method_of
from dgc_horovod.config import AUTO, DGCConfig
from dgc_horovod.errors import ConfigError
from dgc_horovod.planning.trial import COMPRESSED, DENSE
from dgc_horovod.stats import PROCESS, ExchangeStats

_log = logging.getLogger("dgc_horovod")
EVERY = 10.0  # seconds
_OFTEN = 500  # records while a run lasts e times as long
_PARTS = {"buckets": "bucket", "ranks": "rank"}  # lists in a record, and the name of an entry
_BATCH = 1000  # metrics that MLflow takes at once
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


def writer_for(path: str) -> JsonLines | Prometheus | TensorBoard | MLflow:
    """Return the writer for `path`, by its ending: its ``write`` adds a record, the last of which has ``final``.

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
    if path.startswith(MLFLOW):
        return MLflow(path)
    return Prometheus(path) if path.endswith(".prom") else TensorBoard(path)


def is_json_lines(path: str) -> bool:
    """Whether `writer_for` writes JSON lines there."""
    return not (path.startswith(MLFLOW) or path.endswith((".prom", "/")))


class JsonLines:
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


def _library(name: str, path: str) -> Any:
    """Import the library that writes to `path`. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{path!r} needs {name}: pip install {name}") from None


class Prometheus:
    """A file of gauges ``dgc_NAME``, ``dgc_bucket_NAME{bucket="0"}`` and ``dgc_rank_NAME{rank="0"}``."""

    def __init__(self, path: str) -> None:
        self._client, self._path = _library("prometheus_client", path), str(Path(path).absolute())

    def write(self, record: Record) -> None:
        """Replace the file."""
        registry = self._client.CollectorRegistry()
        gauges: dict[str, Any] = {}
        for name, part, number, value in _numbers(record):
            full_name, labels = (f"dgc_{part}_{name}", [part]) if part else (f"dgc_{name}", [])
            if full_name not in gauges:
                text = f"{name} of dgc_horovod's compression_stats()"
                gauges[full_name] = self._client.Gauge(full_name, text, labels, registry=registry)
            gauge = gauges[full_name]
            (gauge.labels(number) if part else gauge).set(value)
        self._client.write_to_textfile(self._path, registry)


class TensorBoard:
    """Scalars ``dgc/NAME``, ``dgc/bucket0/NAME`` and ``dgc/rank0/NAME`` over the steps."""

    def __init__(self, path: str) -> None:
        self._writer = _library("tensorboardX", path).SummaryWriter(path)

    def write(self, record: Record) -> None:
        """Add a point to every curve, at the record's ``steps``."""
        for tag, value in _tagged(record).items():
            self._writer.add_scalar(tag, value, int(record.get("steps", 0)))
        self._writer.flush()
        if record.get("final"):
            self._writer.close()


class MLflow:
    """The scalars of `TensorBoard` in a run of its own, which is not the script's active one."""

    def __init__(self, path: str) -> None:
        mlflow, experiment = _library("mlflow", path), path.removeprefix(MLFLOW)
        self._client, self._metric, self._error = mlflow.MlflowClient(), mlflow.entities.Metric, mlflow.MlflowException
        try:
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            self._run: str = self._client.create_run(number, run_name="dgc_horovod").info.run_id
        except self._error as error:
            raise ConfigError(f"{path!r}: {error}") from None

    def write(self, record: Record) -> None:
        """Add a point to every curve, at the record's ``steps``."""
        now, step = int(1000 * time.time()), int(record.get("steps", 0))
        points = [self._metric(tag, value, now, step) for tag, value in _tagged(record).items()]
        try:
            for first in range(0, len(points), _BATCH):
                self._client.log_batch(self._run, points[first : first + _BATCH])
            if record.get("final"):
                self._client.set_terminated(self._run)
        except self._error as error:
            raise OSError(str(error)) from None


def _tagged(record: Record) -> dict[str, float]:
    """Return every number, under ``dgc/NAME``, ``dgc/bucket0/NAME`` or ``dgc/rank0/NAME``."""
    return {
        f"dgc/{part}{number}/{name}" if part else f"dgc/{name}": value for name, part, number, value in _numbers(record)
    }


def _numbers(record: Record) -> Iterator[tuple[str, str, str, float]]:
    """Yield every finite number: its name, the kind and number of its part ("" for none), and the value."""
    for name, value in record.items():
        if stats.is_figure(value):
            yield name, "", "", float(value)
    for parts, part in _PARTS.items():
        for i, each in enumerate(record.get(parts, ())):
            number = str(each.get(part, i))  # a rank says which it is
            for name, value in each.items():
                if stats.is_figure(value) and name != part:
                    yield name, part, number, float(value)


class Recording:
    """The file of this process, which has none yet (`Process.is_recorded`), until `end`.

    Args:
        path: path of the metrics, see `writer_for`.
        method: name of the compression method, for the records.
        run: description of the job, as JSON, for the first record; its ``id`` stands in every one, by which a reader
            tells it from other jobs that write to the same file.
        ranks_of: function that returns the latest figures of every rank; None: of this rank alone, the first.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str, method: str, run: Mapping[str, Any], ranks_of: RanksOf | None = None) -> None:
        self._path, self._method, self._ranks_of = path, method, ranks_of or (lambda: [rank_figures(0)])
        self._id = run.get("id") or secrets.token_hex(8)
        self._start, self._process = time.monotonic(), os.getpid()
        self._writing, self._ended = threading.Lock(), threading.Event()
        self._told = False
        try:
            self._writer = writer_for(path)
            self._write(False, {"run": run} if run else {})
        except OSError as error:
            raise ConfigError(f"the metrics file {path!r} cannot be written: {error}") from None
        PROCESS.is_recorded = True
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
            "replica_checks": PROCESS.replica_checks,
            "replica_mismatches": PROCESS.replica_mismatches,
            "skips": stats.skips(tallies),
            "advice": advice.given(),
            "buckets": stats.bucket_stats(tallies),
            "ranks": bounded(self._ranks_of()),
            **more,
        }
        self._writer.write(record)


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
        atexit.register(Recording(path, method_of(config), {}).end)
