"""What exchanges of coded elements have in common: a packet, how it is encoded, and no state between steps."""

from __future__ import annotations

import numpy as np

from dgc_horovod.exchange.contract import Outcome, Round
from dgc_horovod.kernels.contract import Elements, Kernels, Sender
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs.values import Draw
from dgc_horovod.wire.packet import PacketFormat, coder_for


class CodedExchange:
    """The parts of `contract.Exchange` that most exchanges share; see there.

    Memory: the packet, and 4 bytes for each of its elements.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        self.rounds = self.rounds_of(wire, workers)
        self.outcome = Outcome()
        self._bucket, self._wire, self._kernels, self._workers = bucket, wire, kernels, workers
        self._coder = coder_for(wire, kernels.coder)
        self._packet = np.zeros(wire.nbytes, np.uint8)
        self._values = np.empty(wire.capacity, np.float32)

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        raise NotImplementedError

    def sender(self, max_candidates: int) -> Sender | None:
        return None

    def _encode(self, elements: Elements, flags: int, step: int, draw: Draw) -> tuple[Elements, np.ndarray]:
        """Fill `_packet`; what is in it, as it stood in the residual, and its values as receivers read them."""
        while True:
            decoded = self._values[: elements.values.size]
            zeros = self._wire.encode(self._coder, *elements, step, flags, self._packet, decoded, draw)
            if not zeros or self._bucket.uncompressed:  # there all elements are sent, or none
                return elements, decoded
            kept = decoded != 0  # what was rounded to zero is not sent, so it is not masked either
            elements = Elements(elements.positions[kept], elements.values[kept])

    @property
    def contributions(self) -> list[Elements]:
        return []

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass
