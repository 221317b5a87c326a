"""The epoch, observed where training scripts already say it: ``DistributedSampler.set_epoch``."""

from __future__ import annotations

import functools
import operator
import weakref
from contextlib import suppress
from typing import Any, Protocol

from torch.utils.data.distributed import DistributedSampler

from dgc_horovod.errors import ConfigError


class EpochListener(Protocol):
    """Anything with an ``epoch`` to keep up to date."""

    epoch: int | None


def whole(epoch: Any) -> int:
    """`epoch` as checkpoints keep it, an int: scripts have whole floats and integers of NumPy, too.

    Raises:
        ConfigError: it is no whole number.
    """
    with suppress(TypeError):
        return operator.index(epoch)
    with suppress(TypeError, ValueError):
        if not isinstance(epoch, (str, bytes)) and float(epoch).is_integer():
            return int(epoch)
    raise ConfigError(f"the epoch must be a whole number, got {epoch!r}")


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
    def tell(self: DistributedSampler[Any], epoch: int) -> None:
        set_epoch(self, epoch)
        for listener in _listeners:
            listener.epoch = whole(epoch)

    return tell
