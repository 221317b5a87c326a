"""Everybody's packet to everybody: one allgather, decoded and added in rank order (DGC section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dgc_horovod.exchange.base import CodedExchange, different_sizes, outcome_of
from dgc_horovod.exchange.contract import ALLGATHER, Round, Sending
from dgc_horovod.kernels.contract import Elements, Kernels, Sender
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs.values import Draw
from dgc_horovod.wire.packet import PacketFormat, undrawn


class AllgatherExchange(CodedExchange):
    """Received per rank: ``(N-1)`` packets. The sum is the same to the last bit on every rank. See `contract.Exchange`.

    Memory: the packet, its values decoded, and 8 bytes for each element received, of as many ranks at a time as take a
    byte for each element of the bucket.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        super().__init__(bucket, wire, kernels, workers)
        self._held = min(workers, max(1, bucket.numel // (8 * wire.capacity)))  # ranks that are held decoded at once
        together = not bucket.uncompressed and self._held == workers
        self._receiver = kernels.receiver(bucket, wire, workers) if together else None
        held = 0 if self._receiver is not None else self._held
        self._decoded = [
            Elements(np.empty(wire.capacity, np.int32), np.empty(wire.capacity, np.float32)) for _ in range(held)
        ]
        self._packets = np.empty((0, wire.nbytes), np.uint8)
        self._counts = np.empty(0, np.int64)

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        return (Round("packets", ALLGATHER, "uint8", wire.nbytes),)

    def sender(self, max_candidates: int) -> Sender | None:
        return self._kernels.sender(self._bucket, self._wire, max_candidates)

    def begin(self, elements: Elements, flags: int, step: int, draw: Draw = undrawn) -> Sending:
        return Sending(self._packet, *self._encode(elements, flags, step, draw))

    def proceed(self, number: int, received: np.ndarray, step: int) -> None:
        wire = self._wire
        if received.size != self._workers * wire.nbytes:
            what = f"{received.size} bytes came back, expected {self._workers} packets of {wire.nbytes}"
            raise different_sizes(wire.bucket, what)
        self._packets = received.reshape(self._workers, wire.nbytes)
        self._counts, flags = wire.read_headers(self._coder, self._packets, step)
        self.outcome = outcome_of(flags)
        if self._receiver is not None:  # what it finds wrong is known after `aggregate_into`, which changes no state
            self._receiver.read(self._packets, self._counts)
        else:
            for _ in self._groups(decoded=False):  # every packet is read before anything is changed
                pass

    def aggregate_into(self, outputs: Any, scale: float) -> bool:
        if self._receiver is not None:
            finite = self._receiver.aggregate_into(outputs, scale)
            self._check()
            return finite
        finite = True
        for number, group in enumerate(self._groups(decoded=self._held == self._workers)):
            finite = self._kernels.aggregate_into(outputs, group, scale, fresh=number == 0) and finite
        return finite

    def _groups(self, decoded: bool) -> Iterator[list[Elements]]:
        """What the ranks sent, in rank order, as many ranks at a time as are held decoded.

        Args:
            decoded: whether the first group is decoded already; it is, if it is the only one, after `proceed`.
        """
        for first in range(0, self._workers, self._held):
            group = []
            ranks = range(first, min(first + self._held, self._workers))
            for memory, rank in zip(self._decoded, ranks, strict=False):
                count = int(self._counts[rank])
                elements = Elements(memory.positions[:count], memory.values[:count])
                if not decoded:
                    self._wire.decode(self._coder, self._packets[rank], count, rank, *elements)
                group.append(elements)
            yield group

    @property
    def contributions(self) -> list[Elements]:
        if self._receiver is not None:
            self._check()
            return self._receiver.contributions
        return [Elements(e.positions.copy(), e.values.copy()) for group in self._groups(decoded=False) for e in group]

    def _check(self) -> None:
        assert self._receiver is not None
        for rank, problem in self._receiver.problems.items():
            raise self._wire.corrupt(rank, f"impossible: {problem}")
