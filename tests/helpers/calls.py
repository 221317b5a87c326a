"""Which calls of the package lead to the C library."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dgc_horovod

_PACKAGE = str(Path(dgc_horovod.__file__).parent)


class _Noting:
    """The library, which notes who has called its pass over a bucket."""

    def __init__(self, library: Any, calls: list[list[str]]) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def dgc_pass(self, *arguments: Any) -> Any:
        ours = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(_PACKAGE)]
        self._calls.append(ours)
        return self._library.dgc_pass(*arguments)


@contextmanager
def calls_to_c(kernels: Any) -> Iterator[list[list[str]]]:
    """Inside, of each pass over a bucket: names of the package's functions from its first one to that call."""
    library, calls = kernels._library, list[list[str]]()
    kernels._library = _Noting(library, calls)
    try:
        yield calls
    finally:
        kernels._library = library
