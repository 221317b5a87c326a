"""The two contracts of an exchange: `Exchange`, its algorithm, and `Transport`, which runs its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from dgc_horovod.kernels.contract import Elements, Kernels, Sender, State
from dgc_horovod.stats import Traffic, ring_received
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import PacketFormat

ALLGATHER, ALLREDUCE, ALLTOALL = "allgather", "allreduce", "alltoall"
# Groups of workers: all workers; the workers of equal local rank, one from each node; the workers of one node
ALL, BETWEEN, INSIDE = "all", "between nodes", "inside a node"


@dataclass(frozen=True)
class Round:
    """One collective of an exchange. It is the same on every rank, and at every step of one density.

    Args:
        name: name of the collective, appended to the bucket's name.
        kind: kind of collective: `ALLGATHER` of equal buffers, `ALLREDUCE` (a sum), or `ALLTOALL` of N equal parts.
        dtype: dtype of the buffer, "uint8" or "float32"; for dense tensors also "float16".
        size: number of elements in the buffer of one rank.
        group: group of workers that take part: `ALL`, `BETWEEN` or `INSIDE`.
    """

    name: str
    kind: str
    dtype: str
    size: int
    group: str = ALL

    @property
    def nbytes(self) -> int:
        """Bytes that a rank passes to the collective."""
        return np.dtype(self.dtype).itemsize * self.size

    def brought(self, workers: int) -> int:
        """Number of elements in the result of one rank.

        Args:
            workers: number of workers of the group, >= 1.
        """
        return self.size * workers if self.kind == ALLGATHER else self.size

    def received(self, workers: int) -> int:
        """Bytes that a rank receives in a ring algorithm.

        Args:
            workers: number of workers of the group, >= 1.
        """
        if self.kind == ALLREDUCE:
            return ring_received(self.nbytes, workers)
        others = (workers - 1) * self.nbytes
        return others if self.kind == ALLGATHER else others // workers


Buffer = Any  # a flat tensor of the adapter's framework
Handle = Any  # a collective under way, as the transport keeps it


class Transport(Protocol):
    """Runs collectives between the workers of one group. Collectives are asynchronous and have names.

    `wait` returns within DGC_TIMEOUT seconds or raises an error.
    """

    rank: int
    workers: int
    traffic: Traffic

    def allgather(self, packet: Buffer, name: str) -> Handle:
        """Start an allgather of equal buffers; the result has them in rank order."""

    def allreduce(self, tensor: Buffer, name: str) -> Handle:
        """Start a sum over ranks."""

    def alltoall(self, tensor: Buffer, name: str) -> Handle:
        """Start an exchange of N equal parts: part i goes to rank i; the result has received parts in rank order."""

    def broadcast(self, tensor: Buffer, name: str, root: int = 0) -> Handle:
        """Start a broadcast from rank `root` of the group."""

    def wait(self, pending: Handle) -> Buffer:
        """Wait for a collective; return its result."""


def start(transports: Mapping[str, Transport], collective: Round, buffer: Buffer, bucket: str) -> Handle:
    """Start a round of the exchange of `bucket`; return the handle for `Transport.wait`.

    Args:
        transports: transport of each group of workers.
        collective: round to start.
        buffer: buffer of this rank, see `Round`.
        bucket: name of the bucket.
    """
    return getattr(transports[collective.group], collective.kind)(buffer, f"{bucket}.{collective.name}")


class Sending(NamedTuple):
    """The first message of an exchange.

    Args:
        buffer: buffer of the first round; may be reused at the next step.
        elements: elements sent, with their values in the residual; without those that a codec rounds to zero.
        decoded: values of `elements` as every rank decodes them, float32.
    """

    buffer: np.ndarray
    elements: Elements
    decoded: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """The flags of all ranks' messages, known after the last round; the same on every rank.

    Args:
        finite: whether every rank's gradient was finite.
        flagged: ranks whose gradient was not finite, where the exchange knows.
        ranks_in_join: number of ranks in join.
        ranks_that_clip: number of ranks whose script clips updates, where the exchange knows; else 0.
        overflowed: whether a shard owner's sums overflowed fp32.
    """

    finite: bool = True
    flagged: list[int] = field(default_factory=list)
    ranks_in_join: int = 0
    ranks_that_clip: int = 0
    overflowed: bool = False


class Exchange(Protocol):
    """One bucket's exchange at one density: message layout, flags, bytes and aggregation.

    Call ``begin``, then ``proceed`` with the result of each of `rounds`, then ``aggregate_into``, once or more, and
    ``settle``; ``commit`` or ``rollback`` ends the step. After an error call ``rollback``.

    Attributes:
        rounds: collectives of the exchange, in order.
        outcome: outcome of the last step, after ``settle``.
        keeps_remainder: whether a rank keeps a part of the elements it receives, in `State.remainder`.
    """

    rounds: tuple[Round, ...]
    outcome: Outcome
    keeps_remainder: bool

    def adopt(self, rank: int, state: State) -> None:
        """Set this rank's state of the bucket, before the first `begin`.

        Args:
            rank: index of this worker among those that exchange the bucket, 0 <= rank < workers.
            state: state of the bucket, or slice; an exchange changes only its `remainder`.
        """
        return

    def sender(self, max_candidates: int) -> Sender | None:
        """Return the device code that writes the first buffer from at most `max_candidates` candidates, or None."""
        return None

    def begin(self, elements: Elements, flags: int, step: int) -> Sending:
        """Encode the message of the first round.

        Args:
            elements: selected elements, ascending; at most the capacity of the wire format. Fewer may be sent.
            flags: sum of flags of `packet`; every round passes FLAG_NONFINITE and FLAG_JOINED on.
            step: schedule step, >= 0, equal on all ranks.
        """

    def proceed(self, number: int, received: np.ndarray, step: int) -> np.ndarray | None:
        """Check the result of round `number`; return the buffer of the next round, None after the last.

        Args:
            number: index of the round, from 0.
            received: result of the round, flat; kept until the next call, that of the last round until ``settle``.
            step: schedule step, see `begin`.

        Raises:
            CorruptPacket, RankMismatch: on every rank. After an alltoall, or a round of a group, ranks have different
                bytes: a rank that finds an error passes it on, and all ranks raise it in a later round. Damage in the
                last round inside a node is seen on that node only; other nodes time out after DGC_TIMEOUT.
        """

    def aggregate_into(self, outputs: Any, scale: float) -> None:
        """``update = scale * sum over ranks``, in one order on every rank. On a device it is started, without a wait.

        Args:
            outputs: outputs of the kernels, one for each segment.
            scale: factor of the sum: 1/N for the mean, 1 for the sum, times the loss scale.
        """

    def settle(self) -> bool:
        """Complete ``aggregate_into``; return whether every element of the update is finite.

        Raises:
            CorruptPacket, RankMismatch: on every rank, where packets are checked and decoded on a device.
        """

    @property
    def contributions(self) -> list[Elements]:
        """Copies of the elements that each rank sent; empty if the exchange does not know them."""
        return []

    def commit(self) -> None:
        """End a step that every rank applies."""
        return

    def rollback(self) -> None:
        """Undo the step on every rank: restore the state of the exchange from before `begin`."""
        return


class FlatExchange(Exchange, Protocol):
    """An exchange of a whole bucket, or of a slice of one, among equal workers.

    Without `adopt` it can read the last round only: workers of a node do so for the slices of the other workers.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        """Allocate the memory of a step.

        Args:
            bucket: layout of the bucket that is exchanged.
            wire: packet format of one rank's selection.
            kernels: backend on the device that holds the outputs.
            workers: N >= 1.
        """

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        """Return `rounds` without allocating memory, for the planner and for graphs that trace the rounds."""


def carry(collective: Round, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the result of each rank when rank i passes ``buffers[i]``; sums are taken in rank order.

    Args:
        collective: round to run.
        buffers: buffers of all N ranks, in rank order, each of the size and dtype of the round.
    """
    if collective.kind == ALLGATHER:
        return [np.concatenate(buffers)] * len(buffers)
    if collective.kind == ALLREDUCE:
        return [sum(buffers[1:], buffers[0].copy())] * len(buffers)
    parts = [np.split(buffer, len(buffers)) for buffer in buffers]
    return [np.concatenate([mine[rank] for mine in parts]) for rank in range(len(buffers))]
