"""A run's metrics file, and the figures that the page shows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from dgc_horovod import files, stats
from dgc_horovod.advice import Straggler
from dgc_horovod.errors import ConfigError
from dgc_horovod.stats import COUNTERS, PARTS

Record = dict[str, Any]
Entry = TypeVar("Entry")


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
        """Description of the job by `dgcrun`; empty for a script that was started without it."""
        return mapping(self.records[0], "run")

    @property
    def job(self) -> str:
        """The id of the job; "" for records without one."""
        return str(self.last.get("id") or self.description.get("id", ""))

    @property
    def ranks(self) -> list[Record]:
        """The latest figures of each rank in the record."""
        return ranks_of(self.last)

    @property
    def timed(self) -> list[tuple[Record, Times]]:
        """The latest figures of each rank whose steps were timed, with the mean times of a step."""
        return [(rank, found) for rank in self.ranks if (found := times(rank)) is not None]

    @property
    def straggler(self) -> Straggler | None:
        """The rank that waits least; None if only one rank is in the records."""
        told = [rank for rank, _ in self.timed]
        return Straggler(told) if len(told) > 1 else None

    def number(self, name: str, missing: float = 0.0) -> float:
        """Return a number of the latest record, see `number`."""
        return number(self.last, name, missing)


def number(record: Mapping[str, Any], name: str, missing: float = 0.0) -> float:
    """Return the number under `name`, `missing` if there is none that is finite."""
    value = record.get(name, missing)
    return float(value) if stats.is_figure(value) else missing


def mapping(record: Mapping[str, Any], name: str) -> Record:
    """Return the mapping under `name`, an empty one if there is none."""
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def entries(record: Mapping[str, Any], name: str, kind: type[Entry]) -> list[Entry]:
    """Return the entries of one kind of the list under `name`, none if there is no list."""
    found = record.get(name)
    return [each for each in found if isinstance(each, kind)] if isinstance(found, list) else []


def ranks_of(record: Record) -> list[Record]:
    """Return the figures of each rank, in the order of ranks."""
    return [
        {**each, "host": str(each.get("host", "")), **{name: number(each, name) for name in ("rank", *COUNTERS)}}
        for each in entries(record, "ranks", dict)
    ]


def read(path: str) -> list[Run]:
    """Return the runs of a metrics file in the order of their begin: later ones are appended, some at the same time.

    Records have the id of their job; those of earlier versions have none, and count as one run after another.

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
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # perhaps of a job that was killed while it wrote
            continue
        if not isinstance(record, dict) or "steps" not in record:
            continue
        job = str(record.get("id", ""))
        run = latest.get(job)
        # another process than the one that has written the records before
        if run is None or run.ended or "run" in record or number(record, "seconds") < run.number("seconds"):
            run = latest[job] = Run([])
            runs.append(run)
        run.records.append(record)
    if not runs:
        raise ConfigError(
            f"{path!r} holds no record of dgc_horovod; it must be the JSON lines of --dgc-metrics-file, not a "
            "file for Prometheus"
        )
    return runs


class Times(NamedTuple):
    """The parts of the time of a step, in seconds; the rest is computing."""

    step: float
    compress: float
    decode: float
    wait: float

    @property
    def compute(self) -> float:
        """Forward, backward, data, evaluation, the optimizer's own step."""
        return max(0.0, self.step - self.compress - self.decode - self.wait)


def times(now: Record, before: Record | None = None) -> Times | None:
    """Return the mean times of a rank's steps since `before`; None if it has made none since."""
    spent = {name: number(now, name) - number(before or {}, name) for name in COUNTERS}
    steps = spent["timed_steps"]
    return Times(spent["step_seconds"] / steps, *(spent[name] / steps for name in PARTS)) if steps > 0 else None


def mean(each: Sequence[Times]) -> Times:
    """Return the mean over ranks."""
    return Times(*(sum(parts) / len(each) for parts in zip(*each, strict=True)))


def series(run: Run) -> dict[int, list[tuple[float, Times]]]:
    """Return for each rank the mean times between two records, with the last step of the interval."""
    found: dict[int, list[tuple[float, Times]]] = {}
    before: dict[int, Record] = {}
    for record in run.records:
        for told in ranks_of(record):
            rank = int(number(told, "rank"))
            between = times(told, before.get(rank))
            if between is not None:
                found.setdefault(rank, []).append((number(told, "timed_steps") + 1, between))
                before[rank] = told
    return found


def skips(run: Run) -> list[tuple[float, str]]:
    """Return the first skipped steps: number from 0, and the place of the cause."""
    pairs = [pair for pair in entries(run.last, "skips", list) if len(pair) == 2]
    return [(number({"step": step}, "step"), str(where)) for step, where in pairs]


# -- numbers as people read them


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    milli = 1000 * seconds
    return f"{milli:,.0f} ms" if abs(milli) >= 10 else f"{milli:.2g} ms"


def percent(share: float) -> str:
    """A share of 1."""
    return f"{100 * share:.3g}%"


def times_less(more: float, less: float) -> str:
    """Return a text on the ratio of `more` to `less`."""
    return f"{more / less:.3g}× less" if less else "-"


def plain(number: float) -> str:
    """A number of any kind; "-" for none, which is NaN."""
    return "-" if math.isnan(number) else f"{number:.3g}"
