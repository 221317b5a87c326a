"""The two contracts of an exchange: `Exchange`, its algorithm, and `Transport`, which carries its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from dgc_horovod.kernels.contract import Elements, Kernels, Sender, State
from dgc_horovod.stats import ring_received
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs import Draw
from dgc_horovod.wire.packet import PacketFormat, undrawn

ALLGATHER, ALLREDUCE, ALLTOALL = "allgather", "allreduce", "alltoall"
# Groups of workers: all; those of equal local rank, one of each node; those of one node
ALL, BETWEEN, INSIDE = "all", "between nodes", "inside a node"


@dataclass(frozen=True)
class Round:
    """One collective of an exchange. It is the same on every rank, and at every step of one density.

    Args:
        name: name of the collective, behind that of the bucket.
        kind: kind of collective: `ALLGATHER` of equal buffers, `ALLREDUCE` (a sum), or `ALLTOALL` of N equal parts.
        dtype: dtype of the buffer, "uint8" or "float32"; of tensors that are not compressed also "float16".
        size: number of elements in the buffer of one rank.
        group: group of workers among which it is made: `ALL`, `BETWEEN` or `INSIDE`.
    """

    name: str
    kind: str
    dtype: str
    size: int
    group: str = ALL

    @property
    def nbytes(self) -> int:
        """Bytes that a rank hands to the collective."""
        return np.dtype(self.dtype).itemsize * self.size

    def brought(self, workers: int) -> int:
        """Number of elements that a rank has after it.

        Args:
            workers: number of workers of its group, >= 1.
        """
        return self.size * workers if self.kind == ALLGATHER else self.size

    def received(self, workers: int) -> int:
        """Bytes that a rank receives, as in ring algorithms.

        Args:
            workers: number of workers of its group, >= 1.
        """
        if self.kind == ALLREDUCE:
            return ring_received(self.nbytes, workers)
        others = (workers - 1) * self.nbytes
        return others if self.kind == ALLGATHER else others // workers


class Transport(Protocol):
    """Who carries bytes between the workers of one group. Collectives are asynchronous and have names.

    Buffers are the framework's flat tensors. `wait` ends after DGC_TIMEOUT seconds at the latest, with an error.
    """

    rank: int
    workers: int

    def allgather(self, packet: Any, name: str) -> Any:
        """Start an allgather of equal buffers; the result holds them in rank order."""

    def allreduce(self, tensor: Any, name: str) -> Any:
        """Start a sum over ranks."""

    def alltoall(self, tensor: Any, name: str) -> Any:
        """Start an exchange of N equal parts: part i goes to rank i; the result holds what came, in rank order."""

    def broadcast(self, tensor: Any, name: str, root: int = 0) -> Any:
        """Start a broadcast from rank `root` of the group."""

    def wait(self, pending: Any) -> Any:
        """The result of a collective that was started."""


def start(transports: Mapping[str, Transport], collective: Round, buffer: Any, bucket: str) -> Any:
    """Start a round of the exchange of `bucket`; for `Transport.wait`.

    Args:
        transports: transport of each group of workers.
        collective: round that is started.
        buffer: buffer of this rank, see `Round`.
        bucket: name of the bucket.
    """
    return getattr(transports[collective.group], collective.kind)(buffer, f"{bucket}.{collective.name}")


class Sending(NamedTuple):
    """What an exchange begins with.

    Args:
        buffer: buffer of the first round; may be used again at the next step.
        elements: elements sent, as they stood in the residual: values that a codec rounds to zero stay behind.
        decoded: values of `elements` as every rank will read them, float32.
    """

    buffer: np.ndarray
    elements: Elements
    decoded: np.ndarray


@dataclass(frozen=True)
class Outcome:
    """What the flags of all ranks say once all rounds are through; the same on every rank.

    Args:
        finite: whether every rank's gradient was finite.
        flagged: ranks whose gradient was not finite, where the exchange knows.
        ranks_in_join: number of ranks in join.
        ranks_that_clip: number of ranks whose script clips updates, where the exchange knows; else 0.
        overflowed: whether an owner's sums of what the ranks sent have left the range of fp32.
    """

    finite: bool = True
    flagged: list[int] = field(default_factory=list)
    ranks_in_join: int = 0
    ranks_that_clip: int = 0
    overflowed: bool = False


class Exchange(Protocol):
    """One bucket's exchange at one density: message layout, marks, flags, bytes, and what comes of it.

    ``begin``, then ``proceed`` with what each of `rounds` has brought, then ``aggregate_into``, which may be repeated;
    ``commit`` or ``rollback`` ends the step, ``rollback`` after an error too.

    Attributes:
        rounds: collectives of the exchange, in order.
        outcome: outcome of the last step whose rounds are all through.
        keeps_remainder: whether ranks keep something of what others have sent, in `State.remainder`.
    """

    rounds: tuple[Round, ...]
    outcome: Outcome
    keeps_remainder: bool

    def adopt(self, rank: int, state: State) -> None:
        """Take up what this rank keeps from step to step; before the first `begin`.

        Args:
            rank: index of this worker among those that exchange the bucket, 0 <= rank < workers.
            state: state of the bucket, or slice; an exchange may change nothing of it but `remainder`.
        """

    def sender(self, max_candidates: int) -> Sender | None:
        """What writes the first buffer on a device, from at most `max_candidates` candidates; None: the host does."""

    def begin(self, elements: Elements, flags: int, step: int, draw: Draw = undrawn) -> Sending:
        """What this rank hands to the first round.

        Args:
            elements: selected elements, ascending; at most the capacity of the wire format. What it sends may be less.
            flags: sum of flags of `packet`; FLAG_NONFINITE and FLAG_JOINED are handed on by every round.
            step: schedule step, >= 0, equal on all ranks.
            draw: function that makes this rank's random source of bucket and step, for a codec that rounds at random.
        """

    def proceed(self, number: int, received: np.ndarray, step: int) -> np.ndarray | None:
        """Check what round `number` has brought; what the next one sends, None after the last.

        Args:
            number: index of the round, from 0.
            received: buffer that the round has brought, flat; kept until the next call.
            step: schedule step, see `begin`.

        Raises:
            CorruptPacket, RankMismatch: on every rank alike. After an alltoall, or a round of a group, not all see the
                same bytes: what one rank finds wrong it hands on, and all raise in a later round. Only what is damaged
                in the last round of a node is seen there alone; the others wait for the next step until DGC_TIMEOUT.
        """

    def aggregate_into(self, outputs: Any, scale: float) -> bool:
        """``update = scale * sum over ranks``, in one order on every rank; returns whether every element is finite.

        Args:
            outputs: outputs of the kernels, one for each segment.
            scale: factor of the sum: 1/N for the mean, 1 for the sum, times the loss scale.

        Raises:
            CorruptPacket: on every rank alike, where packets are decoded on a device.
        """

    @property
    def contributions(self) -> list[Elements]:
        """What each rank sent, as far as the exchange knows; copies."""

    def commit(self) -> None:
        """The step is applied on every rank."""

    def rollback(self) -> None:
        """The step is taken back on every rank: the state of the exchange is as before `begin`."""


class FlatExchange(Exchange, Protocol):
    """An exchange of a whole bucket, or slice of one, among equal workers.

    One that no rank has adopted can read the last round alone: workers of a node do so with the slices of the others.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, kernels: Kernels, workers: int) -> None:
        """Make the memory that a step needs.

        Args:
            bucket: layout of the bucket that is exchanged.
            wire: packet format of one rank's selection.
            kernels: backend on the device that holds the outputs.
            workers: N >= 1.
        """

    @staticmethod
    def rounds_of(wire: PacketFormat, workers: int) -> tuple[Round, ...]:
        """`rounds`, before any memory is made: the planner prices them, a graph is traced by them."""


def carry(collective: Round, buffers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What each rank receives when rank i hands over ``buffers[i]``; sums are taken in rank order.

    Args:
        collective: round that is carried.
        buffers: buffers of all N ranks, in rank order, each of the size and dtype of the round.
    """
    if collective.kind == ALLGATHER:
        return [np.concatenate(buffers)] * len(buffers)
    if collective.kind == ALLREDUCE:
        return [sum(buffers[1:], buffers[0].copy())] * len(buffers)
    parts = [np.split(buffer, len(buffers)) for buffer in buffers]
    return [np.concatenate([mine[rank] for mine in parts]) for rank in range(len(buffers))]
