"""When Adam's second moment is learnt, in the optimizer's slots, and when it goes from there to the engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.notices import NOT_LEARNT, tell_frozen, tell_unknown
from dgc_horovod.tensorflow.gradients.bucket_run import BucketRun
from dgc_horovod.tensorflow.updates.adam import FrozenAdamUpdate
from dgc_horovod.tensorflow.updates.base import PlainUpdate
from dgc_horovod.wire.bucket import PADDING

_Slots = tuple[str, tuple[BucketEngine, int] | None, np.ndarray, np.ndarray]


class SecondMoment:
    """What one exchange knows of a second moment that is learnt in dense steps, and then stays in its slots.

    Args:
        update: form in which gradients enter the residual.

    Attributes:
        learning: whether it is still being learnt: its slots are not divided by their ``1-b2**t`` yet.
    """

    def __init__(self, update: PlainUpdate) -> None:
        self.update = update if isinstance(update, FrozenAdamUpdate) else None
        self.learning = False
        self._takes_first = False  # and not only what the engines have lost of the second

    def begin(self, fresh: bool, dense: bool, runs: Sequence[BucketRun]) -> bool:
        """A step begins; whether the slots are to be taken over.

        Args:
            fresh: whether they hold what was loaded, or flushed.
            dense: whether everything is sent at this step, which is the optimizer's own then.
            runs: buckets of the exchange.
        """
        if self.update is None:
            return fresh
        self._takes_first = fresh or self.learning
        takes = not dense and (self._takes_first or not all(map(_is_shared, runs)))
        self.learning |= dense
        return takes

    def take(self, step: int, iterations: int, slots: Sequence[_Slots]) -> float:
        """Put the slots into the engines.

        Args:
            step: number of the step that begins, from 0, for the first rank to tell of it; -1 elsewhere.
            iterations: number of steps that the optimizer has made, >= 0.
            slots: name of each variable, where it is kept (or None), its momentum and its velocity, whole and flat.

        Returns:
            What the velocities are to be multiplied by.

        Raises:
            UnsupportedUse: nobody has learnt anything.
        """
        assert self.update is not None
        if slots and not any(np.any(velocity) for *_, velocity in slots):
            raise UnsupportedUse(NOT_LEARNT)
        factor = np.float32(self.update.correction(iterations) if self.learning else 1)
        if self.learning and step >= 0:
            tell_frozen(step)
        for name, kept, momentum, velocity in slots:
            if kept is None:
                continue
            if not self.update.take_second(*kept, velocity * factor):
                tell_unknown(name)
            if self._takes_first:
                self.update.take_first(*kept, momentum)
        self.learning = False
        return float(factor)


def _is_shared(run: BucketRun) -> bool:
    """Whether the engine of a bucket has the second moment of all that it keeps."""
    engine: BucketEngine = run.engine
    kept = sum(segment.name != PADDING for segment in engine.bucket.segments)
    return engine.bucket.uncompressed or len(engine.state.shared) == kept
