"""Processes that work beside each other, and end with the one that has started them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes with an interpreter of their own; after an exception, an interrupt too, nothing goes on."""
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as made:
        try:
            yield made
        except BaseException:
            for child in multiprocessing.active_children():  # the pool itself would finish what is in its queue
                child.kill()
            raise
