"""What one rank sends of one bucket at a step, what is decided about it by the density alone, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dgc_horovod.config import DGCConfig
from dgc_horovod.core.bucketing import densified_is_smaller, ranges
from dgc_horovod.core.selection import ThresholdPredictor
from dgc_horovod.errors import RankMismatch
from dgc_horovod.kernels.contract import RANGE, Elements, Kernels, State
from dgc_horovod.wire.bucket import Bucket, SelectionRange
from dgc_horovod.wire.packet import FLAG_JOINED, FLAG_NONFINITE, PacketFormat

# A scattered exchange ends with three sums: of the flags, of the steps modulo 64 and of their squares. Sum and sum of
# squares both fit only if all steps are equal. A flag counts 1 for a gradient that was not finite and N+1 for a rank in
# join, so the sum tells how many there are of each. All stay exact in fp32 below 4,096 ranks.
_STEP_MARK, _MARKS = 64, 3


@dataclass(frozen=True)
class Message:
    """What one rank sends of one bucket.

    Args:
        payload: uint8 packet for an allgather, or float32 vector for a summing allreduce.
        densified: which of the two.
        count: elements selected.
    """

    payload: np.ndarray
    densified: bool
    count: int


@dataclass(frozen=True)
class HostSentRecord:
    """`contract.SentRecord` by way of the host; `masked` is what stood in u."""

    kernels: Kernels
    elements: Elements
    masked: np.ndarray | None

    @property
    def count(self) -> int:
        """See `contract.SentRecord`."""
        return self.elements.values.size

    @property
    def min_magnitude(self) -> float:
        """See `contract.SentRecord`."""
        return min_magnitude(self.elements)

    @property
    def positions(self) -> np.ndarray:
        """See `contract.SentRecord`."""
        return self.elements.positions

    def rollback(self, state: State) -> None:
        """See `contract.SentRecord`."""
        self.kernels.put(state.v, self.elements)
        if self.masked is not None:
            self.kernels.put(state.u, Elements(self.elements.positions, self.masked))


def min_magnitude(elements: Elements) -> float:
    """The smallest magnitude; 0 if there is none."""
    return float(np.abs(elements.values).min()) if elements.values.size else 0.0


def densified(numel: int, positions: np.ndarray, values: np.ndarray, flags: int, step: int, workers: int) -> np.ndarray:
    """The vector for a summing allreduce that carries what a packet would."""
    dense = np.zeros(numel + _MARKS, np.float32)
    dense[positions] = values
    mark = step % _STEP_MARK
    flag = bool(flags & FLAG_NONFINITE) + (workers + 1) * bool(flags & FLAG_JOINED)
    dense[-_MARKS:] = flag, mark, mark * mark
    return dense


def read_summed(received: np.ndarray, bucket: Bucket, step: int, workers: int) -> tuple[np.ndarray, bool, int]:
    """The sum of the ranks' `densified` vectors, whether every rank's gradient was finite, and how many are in join.

    Raises:
        RankMismatch: its size or the steps are not those of this rank.
    """
    if received.size != bucket.numel + _MARKS:
        raise RankMismatch(f"bucket {bucket.index}: {received.size} values came back, expected {bucket.numel + _MARKS}")
    flags, marks, squares = received[-_MARKS:]
    mark = step % _STEP_MARK
    if marks != workers * mark or squares != workers * mark * mark:
        raise RankMismatch(
            f"bucket {bucket.index}: the ranks are at different steps (here {step}); "
            "all ranks must run the same number of steps"
        )
    in_join, not_finite = divmod(int(flags), workers + 1)
    return received[:-_MARKS], not_finite == 0, in_join


class MessageSpec(NamedTuple):
    """What is selected together, the packet for it, and whether a scattered vector is sent instead."""

    ranges: tuple[SelectionRange, ...]
    wire: PacketFormat
    densified: bool


def form(bucket: Bucket, config: DGCConfig, density: float, workers: int) -> MessageSpec:
    """How a bucket is sent at a density.

    Args:
        bucket: of which the message is.
        config: the compression.
        density: of the step, in (0, 1]; a bucket that is sent whole does not mind.
        workers: N.
    """
    density = 1.0 if bucket.uncompressed else density
    parts = ranges(bucket, config.scope, density)
    capacity = sum(span.k for span in parts)
    indices = "every" if bucket.uncompressed else "elias-fano"
    wire = PacketFormat(bucket.index, bucket.numel, capacity, bucket.values or config.values, indices)
    return MessageSpec(parts, wire, densified_is_smaller(bucket.numel, wire.body_bytes, workers))


class Workspace:
    """What depends on the density alone, and the memory that a step of that density needs."""

    def __init__(self, bucket: Bucket, config: DGCConfig, kernels: Kernels, density: float, workers: int) -> None:
        self.density = density
        self.ranges, self.wire, self.densified = form(bucket, config, density, workers)
        capacity = self.wire.capacity
        self.predictor = ThresholdPredictor(
            [s.numel for s in self.ranges], [s.k for s in self.ranges], config.threshold
        )
        self.records = np.zeros(len(self.ranges), RANGE)  # the ranges as kernels read them
        self.records["start"] = [span.start for span in self.ranges]
        self.records["numel"] = [span.numel for span in self.ranges]
        # an exact selection of the whole bucket is the one that devices can make by themselves
        alone = config.rule == "exact" and len(self.ranges) == 1 and not bucket.uncompressed and not self.densified
        looks = self.predictor.max_candidates > 0
        self.sender = kernels.sender(bucket, self.wire, self.predictor.max_candidates) if alone and looks else None
        coded = not bucket.uncompressed and not self.densified
        # ranks whose packets are held decoded at once: as many as take a byte for each element of the bucket
        self.held = min(workers, max(1, bucket.numel // (8 * self.wire.capacity)))
        together = coded and self.held == workers
        self.receiver = kernels.receiver(bucket, self.wire, workers) if together else None
        self.payload = np.zeros(self.wire.nbytes, np.uint8)
        self.decoded = np.empty(capacity, np.float32)
        self.masked = np.empty(capacity, np.float32)
        rooms = 0 if self.receiver is not None else self.held
        self.received = [Elements(np.empty(capacity, np.int32), np.empty(capacity, np.float32)) for _ in range(rooms)]
