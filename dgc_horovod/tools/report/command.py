"""The page of a run: `dgcrun --report` and ``python -m dgc_horovod.report metrics.jsonl -o report.html``.

It is checked before a job that the file can be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dgc_horovod import envvars, files
from dgc_horovod.errors import ConfigError
from dgc_horovod.launch.cli import REPORT
from dgc_horovod.launch.settings import Job
from dgc_horovod.recording import is_json_lines
from dgc_horovod.tools.report.figures import Run, read
from dgc_horovod.tools.report.page import page

_LINES, _PAGES = ".jsonl", (".html", ".htm")


def main() -> int:
    """Write the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dgc_horovod.report", description=main.__doc__)
    parser.add_argument("metrics", help="the file of --dgc-metrics-file, of JSON lines")
    parser.add_argument("-o", "--output", default="report.html", metavar="PATH", help="default: %(default)s")
    given = parser.parse_args()
    try:
        check(given.output, given.metrics)
        runs = read(given.metrics)
        _write(given.output, runs[-1])
    except (ConfigError, OSError) as error:
        print(f"dgc_horovod.report: {error}", file=sys.stderr)
        return 2
    earlier = f"; {len(runs) - 1} earlier ones in the file are not in it" if len(runs) > 1 else ""
    print(f"{given.output}: {runs[-1].number('steps'):.0f} steps{earlier}")
    return 0


def with_metrics(job: Job, path: str) -> Job:
    """Return `job` with the metrics file that the report is made from: one beside the page, if it has none.

    Args:
        job: resolved settings of the job.
        path: path of the page.

    Raises:
        ConfigError: nothing is compressed, the metrics have another form, or the page cannot be written.
    """
    if not job.active:
        raise ConfigError(
            f"{REPORT} shows what compression did, and none was asked for; e.g. dgcrun --dgc {REPORT} ..."
        )
    given = job.settings[envvars.METRICS_FILE]
    if given.value and not is_json_lines(given.value):
        raise ConfigError(
            f"{REPORT} is made from JSON lines, and the metrics file is {given.text!r} ({given.source}); give it "
            "another name, or none"
        )
    check(path, given.value or "")
    if given.value:
        return job
    page = Path(path).absolute()  # report.jsonl beside report.html, else PAGE.jsonl
    beside = page.with_name((page.stem if page.suffix.lower() in _PAGES else page.name) + _LINES)
    return job.with_setting(envvars.METRICS_FILE, str(beside), f"flag {REPORT}")


def write_page(job: Job, path: str, description: dict[str, Any]) -> None:
    """Write the page of a job that has ended in any way; an error here changes no exit code."""
    metrics = job.get(envvars.METRICS_FILE)
    try:
        parts = [run for run in read(metrics) if run.job == description["id"]]
        if not parts:
            raise ConfigError(f"{metrics!r} has no record of this job")
        _write(path, parts[-1])
    except Exception as error:  # from matplotlib or an odd record: the exit code must stay that of the job
        said = error if isinstance(error, (ConfigError, OSError)) else f"{type(error).__name__}: {error}"
        text = (
            f"no report: {said}. Rank 0 writes that file on its host; run there: python -m dgc_horovod.report "
            f"{metrics} -o {path}"
        )
    else:
        text = f"the report is {path}, made of {metrics}"
        if parts[:-1]:  # each new process that becomes rank 0 counts anew
            steps = sum(part.number("steps") for part in parts[:-1])
            text += f"; rank 0 was replaced while it ran, and the {steps:,.0f} steps before are not in it"
    print(f"dgcrun: {text}", file=sys.stderr, flush=True)


def _write(path: str, run: Run) -> None:
    """Write the page of a run in the encoding that it declares. Raises OSError."""
    files.write(path, page(run).encode(errors="replace"))


def check(page: str, metrics: str) -> None:
    """Check that a page can be written.

    Args:
        page: path of the page.
        metrics: path of the metrics file that it is made from; "" if it gets the default name.

    Raises:
        ConfigError: it cannot, or would overwrite a metrics file.
    """
    path = Path(page).absolute()
    if path.suffix == _LINES or (metrics and path.resolve() == Path(metrics).resolve()):
        raise ConfigError(f"the page {page!r} would overwrite a metrics file; name one such as report.html")
    if problem := files.problem_with(path):
        raise ConfigError(f"the page {page!r} cannot be written: {problem}")
