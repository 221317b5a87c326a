"""The epoch of a training script, observed at ``DistributedSampler.set_epoch``."""

from __future__ import annotations

import functools
import operator
from contextlib import suppress
from typing import SupportsFloat, SupportsIndex

from torch.utils.data.distributed import DistributedSampler

from dgc_horovod.errors import ConfigError
from dgc_horovod.torch.session.session import all_alive


def whole(epoch: SupportsIndex | SupportsFloat) -> int:
    """Convert `epoch` to an int; whole floats and NumPy integers are allowed.

    Raises:
        ConfigError: `epoch` is not a whole number.
    """
    with suppress(TypeError):
        return operator.index(epoch)  # type: ignore[arg-type]
    with suppress(TypeError, ValueError):
        if not isinstance(epoch, (str, bytes)) and float(epoch).is_integer():
            return int(float(epoch))
    raise ConfigError(f"the epoch must be a whole number, got {epoch!r}")


def watch() -> None:
    """Report the epoch of every ``set_epoch`` call to sessions whose warm-up needs it, from now on."""
    stock = DistributedSampler.set_epoch
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def tell(self: DistributedSampler[object], epoch: int) -> None:
        stock(self, epoch)
        for session in all_alive():
            if session.config.warmup is not None and session.config.warmup.needs_epoch:
                session.exchange.epoch = whole(epoch)

    DistributedSampler.set_epoch = tell  # type: ignore[method-assign]
