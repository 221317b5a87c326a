"""The file of a page: whether it can be written is known before a job, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from dgc_horovod import files
from dgc_horovod.errors import ConfigError

_LINES, _PAGES = ".jsonl", (".html", ".htm")
_EXAMPLE = "name a file, such as report.html"


def metrics_beside(page: str) -> str:
    """The path of the metrics file of a page that is given none: report.jsonl beside report.html, else PAGE.jsonl."""
    path = Path(page).absolute()
    name = path.stem if path.suffix.lower() in _PAGES else path.name
    return str(path.with_name(name + _LINES))


def check(page: str, metrics: str) -> None:
    """Whether a page can be written.

    Args:
        page: path of the page.
        metrics: path of the metrics file that it is made of; "" where it gets a name of its own.

    Raises:
        ConfigError: it cannot, or would take the place of a metrics file.
    """
    path = Path(page).absolute()
    if path.suffix == _LINES or (metrics and path.resolve() == Path(metrics).resolve()):
        raise ConfigError(f"{page!r} is the name of a metrics file, in whose place the page would be; {_EXAMPLE}")
    try:
        if path.is_dir():
            raise ConfigError(f"{page!r} is a folder; {_EXAMPLE} in it")
        if not path.parent.is_dir():
            raise ConfigError(f"{page!r}: there is no such folder; make it, or {_EXAMPLE}")
        problem = files.problem_with(path)
        if not (problem or path.exists() or os.access(path.parent, os.W_OK)):
            problem = "permission denied"
    except OSError as error:  # a name that is too long, say
        problem = str(error.strerror)
    if problem:
        raise ConfigError(f"{page!r} cannot be written: {problem}")


def write(page: str, text: str) -> None:
    """Write a page in the encoding that it says it has. Raises OSError."""
    files.write(page, text.encode(errors="replace"))
