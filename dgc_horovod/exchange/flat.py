"""Exchanges without nodes: an allgather of packets, or an allreduce of the selection as a dense vector."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dgc_horovod.errors import CorruptPacket, DGCError, RankMismatch
from dgc_horovod.exchange.contract import ALLGATHER, ALLREDUCE, FlatExchange, Outcome, Round, Sending
from dgc_horovod.kernels.contract import Elements, Kernels, Outputs, Sender
from dgc_horovod.wire.bucket import Bucket
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
    """Return the error for a received buffer of an unexpected size, which `what` describes."""
    return RankMismatch(
        f"bucket {bucket}: {what}; the ranks are at different densities: check that every rank sets the same epoch"
    )


def outcome_of(flags: np.ndarray) -> Outcome:
    """Return the outcome from the flags of all ranks' packets, in rank order."""
    flagged = np.flatnonzero(flags & FLAG_NONFINITE).tolist()
    in_join, that_clip = (int(np.count_nonzero(flags & flag)) for flag in (FLAG_JOINED, FLAG_CLIPS))
    return Outcome(not flagged, flagged, in_join, that_clip, bool((flags & FLAG_OVERFLOW).any()))


class PacketWriter:
    """Writes packets of one format.

    Args:
        wire: packet format.
        coder: preferred coder.
        keeps_zeros: whether values that are rounded to zero count as sent.

    Memory: 4 bytes for each element of a packet.
    """

    def __init__(self, wire: PacketFormat, coder: Coder, keeps_zeros: bool) -> None:
        self.wire, self.coder = wire, coder_for(wire, coder)
        self._keeps_zeros = keeps_zeros
        self._values = np.empty(wire.capacity, np.float32)

    def write(self, elements: Elements, flags: int, step: int, packet: np.ndarray) -> tuple[Elements, np.ndarray]:
        """Write `packet`; return the elements sent, with their values in the residual, and the decoded values.

        An element that is rounded to zero does not count as sent, so it is not masked. Its code stays in the packet,
        where it adds nothing: without it the blocks would shift, and more elements would be rounded to zero.
        """
        decoded = self._values[: elements.values.size]
        zeros = self.wire.encode(self.coder, *elements, step, flags, packet, decoded)
        if not zeros or self._keeps_zeros:
            return elements, decoded
        kept = decoded != 0
        return Elements(elements.positions[kept], elements.values[kept]), decoded[kept]


class CodedExchange(FlatExchange):
    """The common part of exchanges of one packet; see `contract.Exchange`.

    Memory: the packet, and 4 bytes for each of its elements.
    """

    keeps_remainder = False

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        self.rounds = self.rounds_of(wire, workers)
        self.outcome, self._finite = Outcome(), True
        self._bucket, self._wire, self._kernels, self._workers = bucket, wire, kernels, workers
        self._writer = PacketWriter(wire, kernels.coder, bucket.uncompressed)  # it sends all elements or none
        self._coder = self._writer.coder
        self._packet = np.zeros(wire.nbytes, np.uint8)

    def settle(self) -> bool:
        return self._finite


class AllgatherExchange(CodedExchange):
    """Received per rank: ``(N-1)`` packets. The sum has the same bits on every rank. See `contract.Exchange`.

    Memory: the packet, its decoded values, and 8 bytes for each received element of the ranks that are decoded at
    once: as many as fit into one byte for each element of the bucket.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        super().__init__(bucket, wire, kernels, workers)
        self._held = min(workers, max(1, bucket.numel // (8 * wire.capacity)))  # ranks that are decoded at once
        together = not bucket.uncompressed and self._held == workers
        self._receiver = kernels.receiver(bucket, wire, workers) if together else None
        held = 0 if self._receiver is not None else self._held
        self._groups: list[list[Elements]] = []
        self._decoded = [
            Elements(np.empty(wire.capacity, np.int32), np.empty(wire.capacity, np.float32)) for _ in range(held)
        ]
        self._packets = np.empty((0, wire.nbytes), np.uint8)
        self._counts, self._step = np.empty(0, np.int64), 0

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        return (Round("packets", ALLGATHER, "uint8", wire.nbytes),)

    def sender(self, max_candidates: int) -> Sender | None:
        return self._kernels.sender(self._bucket, self._wire, max_candidates)

    def begin(self, elements: Elements, flags: int, step: int) -> Sending:
        return Sending(self._packet, *self._writer.write(elements, flags, step, self._packet))

    def proceed(self, number: int, received: np.ndarray, step: int) -> None:
        wire = self._wire
        if received.size != self._workers * wire.nbytes:
            what = f"received {received.size} bytes, expected {self._workers} packets of {wire.nbytes}"
            raise different_sizes(wire.bucket, what)
        self._packets, self._step = received.reshape(self._workers, wire.nbytes), step
        if self._receiver is None:  # else all of this is done after `aggregate_into`, which changes no state
            self._counts, flags = wire.read_headers(self._coder, self._packets, step)
            self.outcome = outcome_of(flags)
            self._groups = list(self._decode())  # every packet, before anything is changed

    def aggregate_into(self, outputs: Outputs, scale: float) -> None:
        if self._receiver is not None:
            self._receiver.aggregate_into(self._packets, self._step, outputs, scale)
            return
        self._finite = True
        for number, group in enumerate(self._groups if len(self._groups) == 1 else self._decode()):
            self._finite &= self._kernels.aggregate_into(outputs, group, scale, fresh=number == 0)

    def settle(self) -> bool:
        if self._receiver is None:
            return self._finite
        finite = self._receiver.settle()
        if self._receiver.refused:
            raise self._refusal(self._receiver.refused)
        self.outcome = outcome_of(self._receiver.flags)
        return finite

    def _refusal(self, ranks: list[int]) -> DGCError:
        """Return the error for packets that the device refuses, as the host finds it."""
        try:
            counts, _ = self._wire.read_headers(self._coder, self._packets, self._step)
            for rank in ranks:
                memory = Elements(np.empty(counts[rank], np.int32), np.empty(counts[rank], np.float32))
                self._wire.decode(self._coder, self._packets[rank], int(counts[rank]), rank, *memory)
        except DGCError as error:
            return error
        return self._wire.corrupt(ranks[0], "damaged on its way to the device")

    def _decode(self) -> Iterator[list[Elements]]:
        """Yield the elements of all ranks in rank order, `_held` ranks at a time; each group has the same memory."""
        for first in range(0, self._workers, self._held):
            group = []
            ranks = range(first, min(first + self._held, self._workers))
            for memory, rank in zip(self._decoded, ranks, strict=False):
                count = int(self._counts[rank])
                elements = Elements(memory.positions[:count], memory.values[:count])
                self._wire.decode(self._coder, self._packets[rank], count, rank, *elements)
                group.append(elements)
            yield group

    @property
    def contributions(self) -> list[Elements]:
        if self._receiver is not None:
            return self._receiver.contributions
        return [Elements(e.positions.copy(), e.values.copy()) for group in self._decode() for e in group]


_STEP_MARK, _MARKS = 64, 3


class DensifiedExchange(CodedExchange):
    """Received per rank: ``2*(N-1)/N * 4n`` bytes, as for dense gradients. See `contract.Exchange`.

    Values are rounded as in a packet, so the residual equals that of the other exchanges.
    """

    _summed: np.ndarray  # of all ranks, without the marks; after `proceed`

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        return (Round("densified", ALLREDUCE, "float32", wire.numel + _MARKS),)

    def begin(self, elements: Elements, flags: int, step: int) -> Sending:
        elements, decoded = self._writer.write(elements, flags, step, self._packet)
        dense = np.zeros(self._bucket.numel + _MARKS, np.float32)
        dense[elements.positions] = decoded
        mark = step % _STEP_MARK
        flag = bool(flags & FLAG_NONFINITE) + (self._workers + 1) * bool(flags & FLAG_JOINED)
        dense[-_MARKS:] = flag, mark, mark * mark
        return Sending(dense, elements, decoded)

    def proceed(self, number: int, received: np.ndarray, step: int) -> None:
        index, numel = self._bucket.index, self._bucket.numel
        if received.size != numel + _MARKS:
            raise RankMismatch(f"bucket {index}: received {received.size} values, expected {numel + _MARKS}")
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
                f"bucket {index}: the sum of the flags is {flags}; it must be a whole number from 0 to {most}"
            )
        in_join, not_finite = divmod(int(flags), self._workers + 1)
        self._summed, self.outcome = received[:-_MARKS], Outcome(not_finite == 0, ranks_in_join=in_join)

    def aggregate_into(self, outputs: Outputs, scale: float) -> None:
        self._finite = self._kernels.aggregate_dense(outputs, self._kernels.from_host(self._summed), scale)
