"""What exchanges of coded elements share: how they are encoded, a packet, and no state between steps."""

from __future__ import annotations

import numpy as np

from dgc_horovod.errors import RankMismatch
from dgc_horovod.exchange.contract import Outcome, Round
from dgc_horovod.kernels.contract import Elements, Kernels, Sender, State
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs.values import Draw
from dgc_horovod.wire.packet import (
    FLAG_CLIPS,
    FLAG_JOINED,
    FLAG_NONFINITE,
    FLAG_OVERFLOW,
    Coder,
    PacketFormat,
    coder_for,
)


def different_sizes(bucket: int, what: str) -> RankMismatch:
    """The error where what came back has another size than expected, as `what` says."""
    return RankMismatch(
        f"bucket {bucket}: {what}; the ranks are at different densities: is the epoch the same everywhere?"
    )


def outcome_of(flags: np.ndarray) -> Outcome:
    """What the flags in the headers of all ranks' packets say, in rank order."""
    flagged = np.flatnonzero(flags & FLAG_NONFINITE).tolist()
    in_join, that_clip = (int(np.count_nonzero(flags & flag)) for flag in (FLAG_JOINED, FLAG_CLIPS))
    return Outcome(not flagged, flagged, in_join, that_clip, bool((flags & FLAG_OVERFLOW).any()))


class PacketWriter:
    """Writes packets of one form.

    Args:
        wire: packet format.
        coder: coder that is preferred.
        keeps_zeros: whether values that are rounded to zero count as sent.

    Memory: 4 bytes for each element of a packet.
    """

    def __init__(self, wire: PacketFormat, coder: Coder, keeps_zeros: bool) -> None:
        self.wire, self.coder = wire, coder_for(wire, coder)
        self._keeps_zeros = keeps_zeros
        self._values = np.empty(wire.capacity, np.float32)

    def write(
        self, elements: Elements, flags: int, step: int, draw: Draw, packet: np.ndarray
    ) -> tuple[Elements, np.ndarray]:
        """Fill `packet`; what it sends, as it stood in the residual, and the values as receivers read them.

        What was rounded to zero is not sent, so it is not masked either. Its codes stay in the packet, where they add
        nothing: encoded without them, blocks would be others, in which more elements are rounded to zero.
        """
        decoded = self._values[: elements.values.size]
        zeros = self.wire.encode(self.coder, *elements, step, flags, packet, decoded, draw)
        if not zeros or self._keeps_zeros:
            return elements, decoded
        kept = decoded != 0
        return Elements(elements.positions[kept], elements.values[kept]), decoded[kept]


class CodedExchange:
    """The parts of `contract.Exchange` that exchanges of one packet share; see there.

    Memory: the packet, and 4 bytes for each of its elements.
    """

    keeps_remainder = False

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        self.rounds = self.rounds_of(wire, workers)
        self.outcome = Outcome()
        self._bucket, self._wire, self._kernels, self._workers = bucket, wire, kernels, workers
        self._writer = PacketWriter(wire, kernels.coder, bucket.uncompressed)  # there all elements are sent, or none
        self._coder = self._writer.coder
        self._packet = np.zeros(wire.nbytes, np.uint8)

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        raise NotImplementedError

    def adopt(self, rank: int, state: State) -> None:
        pass

    def sender(self, max_candidates: int) -> Sender | None:
        return None

    def _encode(self, elements: Elements, flags: int, step: int, draw: Draw) -> tuple[Elements, np.ndarray]:
        """`PacketWriter.write` into `_packet`."""
        return self._writer.write(elements, flags, step, draw, self._packet)

    @property
    def contributions(self) -> list[Elements]:
        return []

    def commit(self) -> None:
        pass

    def rollback(self) -> None:
        pass
