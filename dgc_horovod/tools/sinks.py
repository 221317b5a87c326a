"""Other forms of a run's counters than JSON lines: a Prometheus text file, TensorBoard, MLflow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgc_horovod.errors import ConfigError
from dgc_horovod.recording import MLFLOW, Record, Writer
from dgc_horovod.stats import is_figure

_PARTS = {"buckets": "bucket", "ranks": "rank"}  # lists in a record, and the name of an entry
_BATCH = 1000  # metrics that MLflow takes at once


def sink_for(path: str) -> Writer:
    """See `recording.writer_for`."""
    if path.startswith(MLFLOW):
        return MLflow(path)
    return Prometheus(path) if path.endswith(".prom") else TensorBoard(path)


def _library(name: str, path: str) -> Any:
    """Import the library that writes to `path`. Raises ConfigError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{path!r} needs {name}: pip install {name}") from None


class Prometheus(Writer):
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


class TensorBoard(Writer):
    """Scalars ``dgc/NAME``, ``dgc/bucket0/NAME`` and ``dgc/rank0/NAME`` over the steps."""

    def __init__(self, path: str) -> None:
        self._writer = _library("tensorboardX", path).SummaryWriter(path)

    def write(self, record: Record) -> None:
        """Add a point to every curve, at the record's ``steps``."""
        for tag, value in _tagged(record).items():
            self._writer.add_scalar(tag, value, int(record.get("steps", 0)))
        self._writer.flush()

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()


class MLflow(Writer):
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
        if is_figure(value):
            yield name, "", "", float(value)
    for parts, part in _PARTS.items():
        for i, each in enumerate(record.get(parts, ())):
            number = str(each.get(part, i))  # a rank says which it is
            for name, value in each.items():
                if is_figure(value) and name != part:
                    yield name, part, number, float(value)
