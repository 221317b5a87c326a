"""What an exchange does for Adam beside compressing: ranks tell each other what they see of its gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.second_moment import GAIN, SecondMoments
from dgc_horovod.kernels.contract import Accumulation, Array, ErrorFeedback, SharedMoment
from dgc_horovod.stats import Traffic


class AdamStep:
    """The step under way, as far as the second moments are concerned that all ranks share.

    Args:
        moments: what is known of them.
        place: engine and index of the segment of each tensor that this rank keeps something of.
        workers: N >= 1.
        senders: M >= 1, how many gradients are put together, of ranks or of nodes.
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
        self.step, self.scale = 0, 1.0  # under way, and factor of its gradients (clipping, loss scale)
        self._learns = False
        self._summed: np.ndarray | None = None  # of all ranks' messages

    def feed(self, name: str, b2: float, eps: float) -> Accumulation:
        """How the gradient of a compressed tensor enters the residual at this step, by Adam's b2 and eps."""
        self._learns = True
        self.moments.begin(name, b2, eps)
        if name not in self._place:  # another worker of the node has it
            return ErrorFeedback()
        engine, i = self._place[name]
        return self.moments.feed(name, engine.kernels, engine.bucket.segments[i].offset)

    def measure(self, name: str, gradient: Array, accumulation: Accumulation) -> None:
        """Look at a gradient that is about to enter the residual so, where that is due."""
        if isinstance(accumulation, SharedMoment) and self.moments.is_due(name, self.step):
            self.moments.measure(name, gradient, self.step)

    def take(self, name: str, square: np.ndarray, rest: np.ndarray, steps: int, b2: float, eps: float) -> None:
        """Begin with the second moment of stock Adam; the residual, so far of gradients, becomes one of directions.

        Args:
            name, square, steps, b2: see `Moment.take`.
            rest: gradient that is still to be applied, beside the residual, of the whole tensor, flat.
            eps: Adam's.
        """
        moment = self.moments[name]
        moment.take(square, steps, b2)
        self.moments.refresh(name)
        if name in self._place:
            engine, i = self._place[name]
            segment, (rows, columns) = engine.bucket.segments[i], moment.factors(eps)
            row, column = np.divmod(np.arange(segment.offset, segment.offset + segment.numel), moment.b)
            v = engine.kernels.to_host(engine.state.v[segment.place]) + rest[segment.offset :][: segment.numel]
            v = v * rows[row] * columns[column] / GAIN  # it is of steps that had none
            engine.kernels.write(engine.state.v[segment.place], v.astype(np.float32))

    def message(self) -> np.ndarray | None:
        """What the ranks are to add up, once all buckets are compressed; None: nothing is learnt at this step."""
        if not self._learns:
            return None
        message = self.moments.message(self.step, self.scale)
        if not message.size:  # fewer tensors than steps between two measurements
            self._summed = message
            return None
        self._traffic.count_allreduce(message.nbytes, self._workers)
        return message

    def receive(self, summed: np.ndarray) -> None:
        """The sum of all ranks' messages is there."""
        self._summed = summed

    def close(self, applied: bool, ranks_in_join: int = 0) -> None:
        """End the step, and learn from it if it is applied; ranks in join had no gradient."""
        if applied and self._summed is not None:
            self.moments.learn(self.step, self._summed, self._senders * (1 - ranks_in_join / self._workers))
        self._learns, self._summed = False, None
        self.moments.drop()
