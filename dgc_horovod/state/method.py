"""What a rank's residuals hold: one method's are no good for another; and what is lost where nothing is compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from dgc_horovod.errors import CheckpointError
from dgc_horovod.state.residual_state import (
    FROZEN_SINCE,
    MOMENTUM,
    REMAINDER,
    RESIDUAL,
    Arrays,
    ResidualState,
    refuse_moments,
)

GRADIENTS, CHANGES, SGD_UPDATES, ADAM_UPDATES = "gradients", "changes of weights", "updates of SGD", "updates of Adam"


def check_kept(state: ResidualState, method: str) -> None:
    """Raise CheckpointError unless residuals of `state` are some that an optimizer can go on from.

    Args:
        state: record, without what is the optimizer's own.
        method: what those of the optimizer hold now.
    """
    local = CHANGES in (state.method, method)  # the optimizer's own moments would be taken for others
    if state.method not in ("", method) and state.tensors and (local or not is_flushed(state, local=False)):
        flush = "" if local else "call flush() before saving to change them, "
        raise CheckpointError(  # records of earlier versions do not say what they hold
            f"the residuals hold {state.method}, and this optimizer's hold {method}; go on with the method and the "
            f"kind of optimizer that they were saved with, {flush}or go on without them "
            '(residuals="ignored"): what was not sent is lost then'
        )
    if method != CHANGES:  # local steps: moments in the record are the optimizer's own
        refuse_moments(state)


def refuse_missing(names: Sequence[str]) -> NoReturn:
    """Raise CheckpointError: a record lacks these tensors, which are trained now."""
    raise CheckpointError(f"there are no residuals of {', '.join(map(repr, names[:3]))}: {FROZEN_SINCE}")


@dataclass(frozen=True)
class Left:
    """What a rank has kept that the model has not had: of how many tensors, and its norm, squared."""

    tensors: int
    squares: float


def left_of(state: ResidualState, local: bool) -> Left:
    """What of `state` is lost where nothing is compressed any more; nothing right after a flush.

    Args:
        state: record of a rank.
        local: whether it was kept with local steps: its momentum and moments are the optimizer's own then.
    """
    lost = _lost(state, local)
    squares = sum(float(np.square(x, dtype=np.float64).sum()) for arrays in lost for x in arrays)
    return Left(len(lost), squares)


def is_flushed(state: ResidualState, local: bool) -> bool:
    """Whether `left_of` finds nothing."""
    return not _lost(state, local)


def _lost(state: ResidualState, local: bool) -> list[list[np.ndarray]]:
    parts = (RESIDUAL, REMAINDER) if local else (RESIDUAL, REMAINDER, MOMENTUM)
    kept = state.tensors.values()
    if state.method == ADAM_UPDATES and not state.second:
        return []  # flushed: what is there is what coding has left of small tensors, which Adam cannot apply
    return [found for arrays in kept if (found := _some(arrays, parts))]


def _some(arrays: Arrays, parts: tuple[str, ...]) -> list[np.ndarray]:
    return [arrays[part] for part in parts if part in arrays and arrays[part].any()]
