"""What one rank sends of one bucket at a step, what is decided about it by the density alone, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgc_horovod.bucket import Bucket, Span, sends_scattered, spans
from dgc_horovod.config import DGCConfig
from dgc_horovod.ops.schema import SPAN, Elements
from dgc_horovod.packet import PacketFormat
from dgc_horovod.selection import FloorPredictor


@dataclass(frozen=True)
class Message:
    """What one rank sends of one bucket.

    Args:
        payload: uint8 packet for an allgather, or float32 vector for a summing allreduce.
        scattered: which of the two.
        count: elements selected.
    """

    payload: np.ndarray
    scattered: bool
    count: int


def form(
    bucket: Bucket, config: DGCConfig, density: float, workers: int
) -> tuple[tuple[Span, ...], PacketFormat, bool]:
    """What is selected together at a density, the packet for it, and whether a scattered vector is sent instead.

    Args:
        bucket: of which the message is.
        config: the compression.
        density: of the step, in (0, 1]; a bucket that is sent whole does not mind.
        workers: N.
    """
    density = 1.0 if bucket.whole else density
    runs = spans(bucket, config.scope, density)
    capacity = sum(run.k for run in runs)
    indices = "every" if bucket.whole else "elias-fano"
    wire = PacketFormat(bucket.index, bucket.numel, capacity, bucket.values or config.values, indices)
    return runs, wire, sends_scattered(bucket.numel, wire.body_bytes, workers)


class MessagePlan:
    """What depends on the density alone, and the memory that a step of that density needs."""

    def __init__(self, bucket: Bucket, config: DGCConfig, density: float, workers: int) -> None:
        self.density = density
        self.runs, self.wire, self.scattered = form(bucket, config, density, workers)
        capacity = self.wire.capacity
        self.predictor = FloorPredictor([r.numel for r in self.runs], [r.k for r in self.runs], config.threshold)
        self.spans = np.zeros(len(self.runs), SPAN)
        self.spans["start"] = [run.start for run in self.runs]
        self.spans["numel"] = [run.numel for run in self.runs]
        self.payload = np.zeros(self.wire.nbytes, np.uint8)
        self.decoded = np.empty(capacity, np.float32)
        self.masked = np.empty(capacity, np.float32)
        # ranks whose packets are held decoded at once: as many as take a byte for each element of the bucket
        self.held = min(workers, max(1, bucket.numel // (8 * capacity)))
        self.received = [
            Elements(np.empty(capacity, np.int32), np.empty(capacity, np.float32)) for _ in range(self.held)
        ]
