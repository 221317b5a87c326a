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
_originals: dict[Any, Any] = {}


def observe(listener: EpochListener) -> None:
    """Set ``listener.epoch`` whenever a sampler is told its epoch, for as long as `listener` lives.

    The samplers' ``set_epoch`` is wrapped while there is a listener; it does what it did before.
    """
    _listeners.add(listener)
    for sampler in _sampler_classes():
        if sampler not in _originals:
            _originals[sampler] = sampler.set_epoch
            sampler.set_epoch = _telling(sampler.set_epoch)


def stop_observing() -> None:
    """Give the samplers their own ``set_epoch`` back and forget all listeners."""
    _listeners.clear()
    for sampler, original in _originals.items():
        sampler.set_epoch = original
    _originals.clear()


def _sampler_classes() -> list[Any]:
    from horovod.torch.elastic.sampler import ElasticSampler

    return [DistributedSampler, ElasticSampler]


def _telling(set_epoch: Any) -> Any:
    @functools.wraps(set_epoch)
    def tell(self: Any, epoch: int) -> None:
        set_epoch(self, epoch)
        for listener in _listeners:
            listener.epoch = epoch

    return tell
