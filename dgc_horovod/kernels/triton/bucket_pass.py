"""The pass over a bucket in Triton: what the host prepares for it, and the candidates that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dgc_horovod.kernels.composed import ListedGradients
from dgc_horovod.kernels.contract import AdamFeed, Elements, Feed, MomentumFeed, Seen, State
from dgc_horovod.kernels.triton.accumulate import (
    ADAM_FEED,
    BAD_GRADIENT,
    BAD_RESIDUAL,
    BETA1,
    BETA2,
    BIAS1,
    BIAS2,
    BINS,
    BLOCK,
    EPSILON,
    FLAGS,
    MOMENTUM,
    MOMENTUM_FEED,
    NESTEROV_FEED,
    NOTED,
    RESIDUAL_FEED,
    REST1,
    REST2,
    SCALE,
    take_in,
)
from dgc_horovod.kernels.triton.encode import HEADER_WORDS
from dgc_horovod.kernels.triton.memory import EXACT, BucketMap, Upload, addresses
from dgc_horovod.wire.bucket import Bucket

REPORT, HISTOGRAM = 16, BINS.value  # int32 words
_NUMBERS, _WARPS = 16, 8


def _described(feed: Feed) -> tuple[int, dict[int, float]]:
    """Which form of `take_in` a feed needs, and its numbers."""
    if isinstance(feed, AdamFeed):
        (b1, b2), step = feed.betas, feed.step
        biases = {BIAS1.value: 1 - b1**step, BIAS2.value: (1 - b2**step) ** 0.5, EPSILON.value: feed.eps}
        return ADAM_FEED.value, {BETA1.value: b1, REST1.value: 1 - b1, BETA2.value: b2, REST2.value: 1 - b2, **biases}
    if isinstance(feed, MomentumFeed) and feed.momentum:
        return (NESTEROV_FEED if feed.nesterov else MOMENTUM_FEED).value, {MOMENTUM.value: feed.momentum}
    return RESIDUAL_FEED.value, {}


def alike(gradients: ListedGradients) -> bool:
    """Whether all of them enter the residual in the same way, as one pass takes them."""
    feeds = gradients.feeds
    return feeds.count(feeds[0]) == len(feeds) and not any(gradients.clears)


class BucketPass:
    """`take_in` for one bucket, and its memory.

    Args:
        bucket: its layout.
        device: of its state.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket, self.device = bucket, device
        self.map = BucketMap(bucket, BLOCK.value, device)
        segments = len(bucket.segments)
        self.settings = Upload(
            device,
            {
                "gradients": (torch.int64, segments),
                "floors": (torch.float32, segments),
                "numbers": (torch.float32, _NUMBERS),
                "header": (torch.int32, HEADER_WORDS.value),  # of a packet, if one is written
            },
        )
        self.bases, self.counts = (torch.empty(self.map.blocks, dtype=torch.int32, device=device) for _ in range(2))
        self.room = -1
        self.make_room(0)

    def make_room(self, room: int) -> None:
        """Have memory for that many candidates."""
        if room != self.room:
            self.room = room
            self.positions = torch.empty(max(room, 1), dtype=torch.int32, device=self.device)
            self.values = torch.empty(max(room, 1), dtype=torch.float32, device=self.device)

    def run(
        self,
        gradients: ListedGradients,
        state: State,
        scale: float,
        floors: Sequence[float],
        report: torch.Tensor,
        histogram: torch.Tensor,
    ) -> None:
        """Start the pass; all gradients must have the same feed, and stay until the device has read them.

        Args:
            gradients, state, scale: as in `Kernels.take_in`.
            floors: of each segment.
            report, histogram: zeros, for what is seen.
        """
        feed, numbers = _described(gradients.feeds[0])
        host = self.settings.host
        host["gradients"][:] = addresses(gradients.arrays)
        aligned = self.map.aligned and not (host["gradients"] % 16).any()
        host["floors"][:] = floors
        host["numbers"][SCALE.value] = scale
        for place, number in numbers.items():
            host["numbers"][place] = number
        self.settings.send()
        first, second = state.moments if feed == ADAM_FEED.value and state.moments is not None else (state.u, None)
        unused = state.v
        given = self.settings.device
        take_in[(self.map.blocks,)](
            state.v, unused if first is None else first, unused if second is None else second, given["gradients"],
            self.map.starts, self.map.spread, given["floors"], given["numbers"], report, self.positions, self.values,
            self.bases, self.counts, histogram, self.bucket.numel, self.room, FEED=feed, ALIGNED=aligned,
            num_warps=_WARPS, **EXACT,
        )  # fmt: skip

    def candidates(self, noted: int) -> Elements | None:
        """What has been noted, on the host, by ascending position; None if there was no room for it."""
        if noted > self.room:
            return None
        positions, order = torch.sort(self.positions[:noted])
        return Elements(positions.cpu().numpy(), self.values[:noted][order].cpu().numpy())


def floors_of(bucket: Bucket, spans: np.ndarray) -> list[float]:
    """For each segment the floor of its span."""
    starts = [segment.start for segment in bucket.segments]
    at = np.searchsorted(spans["start"], starts, side="right") - 1
    return [float(floor) for floor in spans["floor"][at]]


def seen(report: np.ndarray, candidates: Callable[[int], Elements | None]) -> Seen:
    """What a pass saw, from its report on the host; `candidates` is asked only if nothing was wrong."""
    flags, noted = int(report[FLAGS.value]), int(report[NOTED.value])
    found = None if flags else candidates(noted)
    return Seen(not flags & BAD_GRADIENT.value, not flags & BAD_RESIDUAL.value, noted, found)
