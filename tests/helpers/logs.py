"""What dgc_horovod says while a test looks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def messages() -> Iterator[list[str]]:
    """A list that fills with the messages logged inside the block."""
    handler = _Texts()
    logging.getLogger("dgc_horovod").addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger("dgc_horovod").removeHandler(handler)
