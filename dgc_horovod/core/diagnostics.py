"""How healthy the compression of one optimizer is: looked at in a few steps, so that it costs nothing that shows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from dgc_horovod.core.engine import BucketEngine

_SECONDS = 1.0  # between two steps that are looked at, at least
_SHARE = 1 / 200  # of the time that may go into it
_MOST_SENT = 1 / 8  # of a bucket, by all ranks together, for their selections to be compared


class Diagnostics:
    """Norms and overlap of sampled steps.

    A rank decides by its own clock which steps it looks at: nothing is exchanged, so nobody has to agree. What a step
    costs is measured, and the next one waits until that is a 200th of the time: the rule bounds the cost for any model.

    Args:
        seconds: time between two steps that are looked at, at least, >= 0.

    Attributes:
        next_look: time from which on the next step is looked at, on the clock of ``time.perf_counter``.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds, self.next_look, self._cost = seconds, 0.0, 0.0
        self._looks: bool | None = None  # at the step under way; None: it has not begun
        self._gradient = self._residual = self._entered = 0.0  # sums of squares; of what enters the residual
        self._pairs = self._all_pairs = 0  # of ranks that send the same element; those if all sent the same elements
        self._lock = threading.Lock()  # buckets may be compressed by several threads

    def before(self, engine: BucketEngine, scale: float) -> None:
        """The gradients of `engine`, times `scale`, are about to be taken in. Costs a read of them in such a step."""
        with self._lock:
            if self._looks is None:
                self._looks = time.perf_counter() >= self.next_look
        if self._looks and not engine.bucket.uncompressed:
            with self._looking():
                square = scale**2 * engine.gradients.squared_norm()
                self._gradient += square
                self._entered += engine.bucket.numel if engine.adds_directions else square  # each about 1

    def compressed(self, engine: BucketEngine) -> None:
        """What `engine` sends is taken out of v. Costs a read of v in such a step."""
        if self._looks and not engine.bucket.uncompressed:
            with self._looking():
                self._residual += engine.kernels.sums(engine.state.v)[1]

    def aggregated(self, engine: BucketEngine) -> None:
        """All ranks' messages are read. Costs another decoding of them, and a sort of their positions."""
        senders, sent = engine.topology.nodes, engine.sent_positions.size
        if not self._looks or engine.bucket.uncompressed or engine.exchange.keeps_remainder or senders == 1:
            return  # an owner does not see who has sent what
        if senders * sent > _MOST_SENT * engine.bucket.numel:
            return
        with self._looking():
            contributions = engine.exchange.contributions  # zeros in them are what was not sent
            selections = [elements.positions[elements.values != 0] for elements in contributions]
            if selections:
                _, senders_of = np.unique(np.concatenate(selections), return_counts=True)
                self._pairs += int((senders_of * (senders_of - 1)).sum())
                self._all_pairs += int(senders_of.sum()) * (senders - 1)

    def close(self, finite: bool) -> dict[str, float]:
        """End the step.

        Returns:
            Nothing unless the step was looked at and is `finite`. ``gradient_norm`` and ``residual_norm``: L2 norms of
            this rank's gradient (clipped, of the compressed tensors) and of v after what was sent is taken out;
            ``residual_ratio``: the second in that of what enters at a step, the gradient or Adam's direction, where
            that is not 0.
            ``overlap``, in [0, 1]: of the elements that a rank sends, the share that another rank sends as well, on
            average over all pairs of ranks; not there where the exchange does not show who sends what.
        """
        figures: dict[str, float] = {}
        if self._looks and finite:
            figures = {"gradient_norm": math.sqrt(self._gradient), "residual_norm": math.sqrt(self._residual)}
            if self._entered:
                figures["residual_ratio"] = math.sqrt(self._residual / self._entered)
            if self._all_pairs:
                figures["overlap"] = self._pairs / self._all_pairs
        if self._looks:
            self.next_look = time.perf_counter() + max(self._seconds, self._cost / _SHARE)
        self._looks, self._cost = None, 0.0
        self._gradient = self._residual = self._entered = 0.0
        self._pairs = self._all_pairs = 0
        return figures

    @contextmanager
    def _looking(self) -> Iterator[None]:
        with self._lock:
            start = time.thread_time()  # what a machine with too few cores takes away is no cost of ours
            yield
            self._cost += time.thread_time() - start
