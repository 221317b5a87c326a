"""Adam's part of an exchange: the ranks add up measurements of their gradients for the shared second moments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.second_moment import GAIN, SecondMoments
from dgc_horovod.kernels.contract import Accumulation, Array, ErrorFeedback, SharedMoment
from dgc_horovod.stats import Traffic


class AdamStep:
    """The second moments' part of one step.

    Args:
        moments: second moments that all ranks share.
        place: engine and segment index of each tensor that this rank keeps elements of.
        workers: N >= 1.
        senders: M >= 1, number of gradients that are combined, of ranks or of nodes.
        traffic: counter of the messages.
    """

    def __init__(
        self,
        moments: SecondMoments,
        place: Mapping[str, tuple[BucketEngine, int]],
        workers: int,
        senders: int,
        traffic: Traffic,
    ) -> None:
        self.moments, self._place, self._workers, self._senders = moments, place, workers, senders
        self._traffic = traffic
        self.step, self.scale = 0, 1.0  # the present step, and the factor of its gradients (clipping, loss scale)
        self._learns = False
        self._summed: np.ndarray | None = None  # sum of all ranks' messages

    def feed(self, name: str, b2: float, eps: float, rate: float) -> Accumulation:
        """Return how the gradient of a compressed tensor enters the residual at this step.

        The residual fades first if the learning rate has risen; that takes one pass over it.

        Args:
            name: name of the tensor.
            b2, eps: Adam's.
            rate: learning rate of this step, >= 0.
        """
        self._learns = True
        self.moments.begin(name, b2, eps)
        fading = self.moments[name].fading(rate)
        if name not in self._place:  # another worker of the node keeps it
            return ErrorFeedback()
        engine, i = self._place[name]
        if fading < 1:
            engine.state.fade(i, fading)
        return self.moments.feed(name, engine.kernels, engine.bucket.segments[i].offset)

    def measure(self, name: str, gradient: Array, accumulation: Accumulation) -> None:
        """Measure a gradient before it enters the residual, if its tensor is due."""
        if isinstance(accumulation, SharedMoment) and self.moments.is_due(name, self.step):
            self.moments.measure(name, gradient, self.step)

    def take(self, name: str, square: np.ndarray, rest: np.ndarray, steps: int, b2: float, eps: float) -> None:
        """Start from stock Adam's second moment; convert the residual from gradients to directions.

        Args:
            name, square, steps, b2: see `Moment.take`.
            rest: gradient of the whole tensor, flat, that is still to be applied in addition to the residual.
            eps: Adam's eps.
        """
        moment = self.moments[name]
        moment.take(square, steps, b2)
        if name in self._place:
            engine, i = self._place[name]
            segment, (rows, columns) = engine.bucket.segments[i], moment.factors(eps)
            row, column = np.divmod(np.arange(segment.offset, segment.offset + segment.numel), moment.b)
            v = engine.kernels.to_host(engine.state.v[segment.place]) + rest[segment.offset :][: segment.numel]
            v = v * rows[row] * columns[column] / GAIN  # its steps were without the gain
            engine.kernels.write(engine.state.v[segment.place], v.astype(np.float32))

    def message(self) -> np.ndarray | None:
        """Return the vector that the ranks add up after all buckets are compressed; None if nothing is due."""
        if not self._learns:
            return None
        message = self.moments.message(self.step, self.scale)
        if not message.size:  # no tensor is due: there are fewer of them than steps between two measurements
            self._summed = message
            return None
        self._traffic.count_allreduce(message.nbytes, self._workers)
        return message

    def receive(self, summed: np.ndarray) -> None:
        """Take the sum of all ranks' messages."""
        self._summed = summed

    def close(self, applied: bool, ranks_in_join: int = 0) -> None:
        """End the step; learn from it if it is applied. Ranks in join have no gradient."""
        if applied and self._summed is not None:
            self.moments.learn(self.step, self._summed, self._senders * (1 - ranks_in_join / self._workers))
        self._learns, self._summed = False, None
        self.moments.drop()
