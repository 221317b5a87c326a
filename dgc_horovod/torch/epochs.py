"""The epoch, observed where training scripts already say it: ``DistributedSampler.set_epoch``."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch.utils.data.distributed import DistributedSampler


class EpochListener(Protocol):
    """Anything with an ``epoch`` to keep up to date."""

    epoch: int | None


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def observe(listener: EpochListener) -> None:
    """Set ``listener.epoch`` whenever a DistributedSampler is told its epoch, for as long as `listener` lives.

    The sampler's ``set_epoch`` is wrapped at the first call, and does what it did before.
    """
    _listeners.add(listener)
    if not hasattr(DistributedSampler.set_epoch, "__wrapped__"):
        DistributedSampler.set_epoch = _telling(DistributedSampler.set_epoch)  # type: ignore[method-assign]


def _telling(set_epoch: Any) -> Any:
    @functools.wraps(set_epoch)
    def tell(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        for listener in _listeners:
            listener.epoch = epoch

    return tell
