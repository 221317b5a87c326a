"""Where the counters of a run go: JSON lines, a Prometheus text file, TensorBoard.

``writer_for("run.jsonl").write(optimizer.compression_stats())``; `dgcrun --dgc-metrics-file` does it every ten seconds.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dgc_horovod.errors import ConfigError

Record = Mapping[str, Any]  # numbers and texts by name; under "buckets" one more for each bucket


class Writer(Protocol):
    """Somewhere to write records to."""

    def write(self, record: Record) -> None:
        """Add a record, or put it in place of the one before."""

    def close(self) -> None:
        """No more will come."""


def writer_for(path: str) -> Writer:
    """The writer that the end of `path` asks for.

    Args:
        path: path of the metrics; ``*.prom``: text format of Prometheus' node exporter, replaced at every write (extra
            ``dgc-horovod[prometheus]``); ``*/``: folder for TensorBoard (extra ``dgc-horovod[tensorboard]``); any
            other: JSON lines.

    Raises:
        ConfigError: the extra is not installed.
    """
    if path.endswith(".prom"):
        return Prometheus(path)
    return TensorBoard(path) if path.endswith("/") else JsonLines(path)


class JsonLines:
    """A line of JSON a record."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, record: Record) -> None:
        """Add a line, with the time if the record has none."""
        with self._path.open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")

    def close(self) -> None:
        """See `Writer`."""


class Prometheus:
    """A file of gauges ``dgc_NAME`` and ``dgc_bucket_NAME{bucket="0"}``."""

    def __init__(self, path: str) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError(f"{path!r} needs prometheus_client: pip install dgc-horovod[prometheus]") from None
        self._client, self._path = prometheus_client, path

    def write(self, record: Record) -> None:
        """Replace the file."""
        registry = self._client.CollectorRegistry()
        gauges: dict[str, Any] = {}
        for name, bucket, value in _numbers(record):
            full_name, labels = (f"dgc_{name}", []) if bucket is None else (f"dgc_bucket_{name}", ["bucket"])
            if full_name not in gauges:
                text = f"{name} of dgc_horovod's compression_stats()"
                gauges[full_name] = self._client.Gauge(full_name, text, labels, registry=registry)
            gauge = gauges[full_name]
            (gauge if bucket is None else gauge.labels(str(bucket))).set(value)
        self._client.write_to_textfile(self._path, registry)

    def close(self) -> None:
        """See `Writer`."""


class TensorBoard:
    """Scalars ``dgc/NAME`` and ``dgc/bucket0/NAME`` over the steps."""

    def __init__(self, path: str) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise ConfigError(f"{path!r} needs tensorboardX: pip install dgc-horovod[tensorboard]") from None
        self._writer = tensorboardX.SummaryWriter(path)

    def write(self, record: Record) -> None:
        """Add a point to every curve, at the record's ``steps``."""
        for name, bucket, value in _numbers(record):
            tag = f"dgc/{name}" if bucket is None else f"dgc/bucket{bucket}/{name}"
            self._writer.add_scalar(tag, value, int(record.get("steps", 0)))
        self._writer.flush()

    def close(self) -> None:
        """See `Writer`."""
        self._writer.close()


def _numbers(record: Record) -> Iterator[tuple[str, int | None, float]]:
    """Name, number of the bucket or None, and value, of everything that is a finite number."""
    for name, value in record.items():
        if _is_number(value):
            yield name, None, float(value)
    for number, bucket in enumerate(record.get("buckets", ())):
        for name, value in bucket.items():
            if _is_number(value):
                yield name, number, float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
