"""The selection as a dense vector, summed by one allreduce: cheaper than packets where much is sent by many.

Three more floats go with it: the sums of the flags, of the steps modulo 64, and of their squares. Sum and sum of
squares both fit only if all steps are equal. A flag counts 1 for a gradient that was not finite and N+1 for a rank in
join, so the sum tells how many there are of each. All stay exact in fp32 below 4,096 ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.exchange.base import CodedExchange
from dgc_horovod.exchange.contract import ALLREDUCE, Outcome, Round, Sending
from dgc_horovod.kernels.contract import Elements, Kernels
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs.values import Draw
from dgc_horovod.wire.packet import FLAG_JOINED, FLAG_NONFINITE, PacketFormat, undrawn

_STEP_MARK, _MARKS = 64, 3


class DensifiedExchange(CodedExchange):
    """Received per rank: ``2*(N-1)/N * 4n`` bytes, as of dense gradients. See `contract.Exchange`.

    Values are rounded as in a packet, so the residual is that of any other exchange.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        super().__init__(bucket, wire, kernels, workers)
        self._summed = np.empty(0, np.float32)

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        return (Round("densified", ALLREDUCE, "float32", wire.numel + _MARKS),)

    def begin(self, elements: Elements, flags: int, step: int, draw: Draw = undrawn) -> Sending:
        elements, decoded = self._encode(elements, flags, step, draw)
        dense = np.zeros(self._bucket.numel + _MARKS, np.float32)
        dense[elements.positions] = decoded
        mark = step % _STEP_MARK
        flag = bool(flags & FLAG_NONFINITE) + (self._workers + 1) * bool(flags & FLAG_JOINED)
        dense[-_MARKS:] = flag, mark, mark * mark
        return Sending(dense, elements, decoded)

    def proceed(self, number: int, received: np.ndarray, step: int) -> None:
        index, numel = self._bucket.index, self._bucket.numel
        if received.size != numel + _MARKS:
            raise RankMismatch(f"bucket {index}: {received.size} values came back, expected {numel + _MARKS}")
        flags, marks, squares = received[-_MARKS:]
        mark = step % _STEP_MARK
        if marks != self._workers * mark or squares != self._workers * mark * mark:
            raise RankMismatch(
                f"bucket {index}: the ranks are at different steps (here {step}); "
                "all ranks must run the same number of steps"
            )
        most = self._workers * (self._workers + 2)
        if not 0 <= flags <= most or flags != int(flags):  # NaN is in no range
            raise CorruptPacket(
                f"bucket {index}: the sum of the flags is {flags}, a whole number up to {most} is possible"
            )
        in_join, not_finite = divmod(int(flags), self._workers + 1)
        self._summed, self.outcome = received[:-_MARKS], Outcome(not_finite == 0, ranks_in_join=in_join)

    def aggregate_into(self, outputs: Any, scale: float) -> bool:
        return self._kernels.aggregate_dense(outputs, self._kernels.from_host(self._summed), scale)
