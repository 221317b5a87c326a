"""Messages that are late: as those of a device, which other ranks' devices may have made already."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dgc_horovod.core.engine import BucketEngine

SPEEDS: dict[str, Callable[[random.Random], bool]] = {
    "at once": lambda chance: True,
    "never": lambda chance: False,
    "by chance": lambda chance: chance.random() < 0.4,
}


@contextmanager
def ready(speed: str, rank: int) -> Iterator[None]:
    """Inside, `BucketEngine.ready` is what `SPEEDS` says; by chance means another one on every rank."""
    stock, chance = BucketEngine.ready, random.Random(rank)
    BucketEngine.ready = property(lambda engine: SPEEDS[speed](chance))  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BucketEngine.ready = stock  # type: ignore[method-assign]
