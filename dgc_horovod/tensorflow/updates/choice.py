"""Which split of its arithmetic fits a user's optimizer."""

from __future__ import annotations

from typing import Any

import keras

from dgc_horovod.config import DGCConfig
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import ADAM_AFTER, no_momentum, of_other, refusal
from dgc_horovod.tensorflow.updates.adam import AdamUpdate
from dgc_horovod.tensorflow.updates.base import PlainUpdate
from dgc_horovod.tensorflow.updates.sgd import SGDUpdate


def choose_update(optimizer: Any, kind: type, config: DGCConfig | None) -> PlainUpdate:
    """The split that fits `optimizer`, of the user's class `kind`; plain error feedback where there is none.

    Raises:
        UnsupportedUse: Adafactor; Adam's amsgrad under momentum correction.
    """
    notices, adam, sgd = [], _steps_as(kind, keras.optimizers.Adam), _steps_as(kind, keras.optimizers.SGD)
    if config is not None and not config.sends_all and _steps_as(kind, keras.optimizers.Adafactor):
        raise UnsupportedUse(
            f"{kind.__name__} of Keras divides by what it knows of rows and columns of a gradient: where nothing of a "
            "row and a column is sent, as happens under compression, its weights become NaN. Use Adam or AdamW; or "
            "local steps, Compression.local(...), which leave its steps to it; or Compression.none"
        )
    unknown = "" if adam or sgd else kind.__name__
    if config is None or not config.momentum_correction:
        notices += [ADAM_AFTER] if issubclass(kind, keras.optimizers.Adam) else []
        return PlainUpdate(*notices, unknown=unknown)
    if config.momentum_dtype != "fp32" and not sgd:
        notices.append(no_momentum(kind))
    if unknown:
        return PlainUpdate(*notices, *of_other(kind, corrects=True), unknown=unknown)
    if adam and optimizer.amsgrad:
        raise UnsupportedUse(refusal("Adam's amsgrad", "amsgrad=False"))
    update: PlainUpdate = SGDUpdate(optimizer) if sgd else AdamUpdate(optimizer)
    update.notices += notices
    return update


def _steps_as(kind: Any, base: Any) -> bool:
    """Whether it is a `base` whose steps no subclass has changed."""
    return issubclass(kind, base) and kind.update_step is base.update_step
