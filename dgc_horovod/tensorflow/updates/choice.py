"""Which split of its arithmetic fits a user's optimizer."""

from __future__ import annotations

from typing import Any

import keras

from dgc_horovod.config import FROZEN, DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import ADAM_AFTER, refusal, tell_no_momentum, tell_no_second_moment, tell_plain
from dgc_horovod.tensorflow.updates.adam import AdamUpdate, FrozenAdamUpdate
from dgc_horovod.tensorflow.updates.base import PlainUpdate
from dgc_horovod.tensorflow.updates.sgd import SGDUpdate


def choose_update(optimizer: Any, kind: type, config: DGCConfig | None) -> PlainUpdate:
    """The split that fits `optimizer`, of the user's class `kind`; plain error feedback where there is none.

    Raises:
        UnsupportedUse: Adam's amsgrad under momentum correction.
    """
    if config is not None and config.second_moment == FROZEN and not _steps_as(kind, keras.optimizers.Adam):
        tell_no_second_moment(kind.__name__)
    if config is None or not config.momentum_correction:
        return PlainUpdate(ADAM_AFTER if issubclass(kind, keras.optimizers.Adam) else "")
    if _steps_as(kind, keras.optimizers.SGD):
        return SGDUpdate(optimizer)
    if config.momentum_dtype != "fp32":
        tell_no_momentum(kind.__name__)
    if _steps_as(kind, keras.optimizers.Adam):
        if optimizer.amsgrad:
            raise UnsupportedUse(refusal("Adam's amsgrad", "amsgrad=False"))
        return FrozenAdamUpdate(optimizer) if config.freezes_second_moment else AdamUpdate(optimizer)
    tell_plain(kind.__name__)
    return PlainUpdate()


def _steps_as(kind: Any, base: Any) -> bool:
    """Whether it is a `base` whose steps no subclass has changed."""
    return issubclass(kind, base) and kind.update_step is base.update_step
