"""When Adam's second moment is learnt, in the optimizer's slots, and when it goes from there to the engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import NOT_LEARNT, tell_frozen, tell_unknown
from dgc_horovod.state.residual_state import SHARED, ResidualState
from dgc_horovod.tensorflow.gradients.bucket_run import BucketRun
from dgc_horovod.tensorflow.updates.adam import FrozenAdamUpdate
from dgc_horovod.tensorflow.updates.base import PlainUpdate
from dgc_horovod.wire.bucket import PADDING

_Slots = tuple[str, tuple[BucketEngine, int] | None, np.ndarray, np.ndarray]


class SecondMoment:
    """What one exchange does with a second moment that is learnt in dense steps, and then stays in its slots.

    Args:
        update: form in which gradients enter the residual.
    """

    def __init__(self, update: PlainUpdate) -> None:
        self.update = update if isinstance(update, FrozenAdamUpdate) else None
        self._told = False

    def begin(self, fresh: bool, dense: bool, runs: Sequence[BucketRun]) -> bool:
        """A step begins; whether the slots are to be taken over.

        Args:
            fresh: whether they hold what was loaded, or flushed.
            dense: whether the second moment is learnt at this step, which is the optimizer's own then.
            runs: buckets of the exchange.
        """
        if self.update is None:
            return fresh
        return not dense and (fresh or not all(map(_is_shared, runs)))

    def take(self, step: int, iterations: int, share: int, slots: Sequence[_Slots]) -> np.ndarray:
        """Put the slots into the engines.

        Args:
            step: number of the step that begins, from 0, for the first rank to tell of it; -1 elsewhere.
            iterations: number of steps that the optimizer has made, >= 0.
            share: number of ranks among whom a first moment is shared out, >= 1: 1 where gradients are averaged.
            slots: name of each variable, where it is kept (or None), its momentum and its velocity, whole and flat.

        Returns:
            What the velocities are to be multiplied by, (variables,) float32.

        Raises:
            UnsupportedUse: nobody has learnt anything.
        """
        update = self.update
        assert update is not None
        update.share = share
        begun = any(kept[0].state.begun for _, kept, *_ in slots if kept is not None)
        if slots and not any(np.any(velocity) for *_, velocity in slots):
            raise UnsupportedUse(NOT_LEARNT)
        if not self._told and not begun and step >= 0:
            tell_frozen(step)
        self._told = True
        factors = np.array([update.correction(momentum, iterations) for *_, momentum, _ in slots], np.float32)
        for (name, kept, momentum, velocity), factor in zip(slots, factors, strict=True):
            if kept is None:
                continue
            engine, i = kept
            if i not in engine.state.shared and not update.take_second(engine, i, velocity * factor) and step >= 0:
                tell_unknown(name)
            if i not in engine.state.begun:
                update.take_first(engine, i, momentum / np.float32(share))
        return factors


def _is_shared(run: BucketRun) -> bool:
    """Whether the engine of a bucket has the second moment of all that it keeps."""
    engine: BucketEngine = run.engine
    kept = sum(segment.name != PADDING for segment in engine.bucket.segments)
    return engine.bucket.uncompressed or len(engine.state.shared) == kept


def add_shared(buckets: OptimizerExchange, state: ResidualState) -> None:
    """Add the second moments to a record, to the bit: in a file's slots they are rounded once more."""
    for name, (engine, i) in buckets.place.items():
        if i in engine.state.shared:
            second = engine.state.adam_moments()[1][engine.bucket.segments[i].place]
            state.tensors[name][SHARED] = engine.kernels.to_host(second).copy()


def take_shared(buckets: OptimizerExchange, state: ResidualState) -> None:
    """The reverse, after the record was loaded."""
    for name, arrays in state.tensors.items():
        if SHARED in arrays and name in buckets.place:
            engine, i = buckets.place[name]
            place = engine.bucket.segments[i].place
            engine.state.adam_moments()[1][place] = engine.kernels.from_host(arrays[SHARED])
            engine.state.shared.add(i)
