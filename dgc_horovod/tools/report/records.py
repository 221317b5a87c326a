"""The metrics file of a run, as it was recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dgc_horovod import files
from dgc_horovod.errors import ConfigError
from dgc_horovod.stats import COUNTERS

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The records of one run.

    Args:
        records: records in the order of time; at least one.
    """

    records: list[Record]

    @property
    def last(self) -> Record:
        """The latest record, with all counters."""
        return self.records[-1]

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end."""
        return bool(self.last.get("final"))

    @property
    def description(self) -> Mapping[str, Any]:
        """What `dgcrun` said of the job; empty for a script that was started without it."""
        found = self.records[0].get("run")
        return found if isinstance(found, dict) else {}

    @property
    def job(self) -> str:
        """The id of the job; "" where no version of dgc_horovod has given it one."""
        return str(self.last.get("id") or self.description.get("id", ""))

    @property
    def ranks(self) -> list[Record]:
        """What each rank told last, of those that are kept."""
        return ranks_of(self.last)


def number(record: Mapping[str, Any], name: str, missing: float = 0.0) -> float:
    """The number under `name`, `missing` if there is none that is finite."""
    value = record.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else missing
    except OverflowError:  # a whole number beyond 1e308
        return missing


def ranks_of(record: Record) -> list[Record]:
    """What each rank told, in the order of ranks."""
    found = record.get("ranks")
    told = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return [
        {**each, "host": str(each.get("host", "")), **{name: number(each, name) for name in ("rank", *COUNTERS)}}
        for each in told
    ]


def read(path: str) -> list[Run]:
    """The runs of a metrics file in the order in which they began: later ones are appended, some at the same time.

    Records have the id of their job; those of older versions have none, and are taken for one run after another.

    Args:
        path: path of a file of JSON lines, see `recording.writer_for`.

    Raises:
        ConfigError: it cannot be read, or holds no record.
    """
    try:
        lines = files.read(path).decode(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"the metrics file {path!r} cannot be read: {error}") from None
    runs: list[Run] = []
    latest: dict[str, Run] = {}  # of each job
    for record in _records(lines):
        job = str(record.get("id", ""))
        run = latest.get(job)
        if run is None or _begins(record, run):
            run = latest[job] = Run([])
            runs.append(run)
        run.records.append(record)
    if not runs:
        raise ConfigError(
            f"{path!r} holds no record of dgc_horovod; it must be the JSON lines of --dgc-metrics-file, not a "
            "file for Prometheus"
        )
    return runs


def _begins(record: Record, run: Run) -> bool:
    """Whether a record is the first of another process than the one that has written `run`."""
    return run.ended or "run" in record or number(record, "seconds") < number(run.last, "seconds")


def _records(lines: list[str]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # of a job that was killed while it wrote, perhaps
            continue
        if isinstance(record, dict) and "steps" in record:
            yield record
