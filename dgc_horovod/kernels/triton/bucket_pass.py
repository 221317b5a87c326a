"""The pass over a bucket in Triton: what the host prepares for it, and the candidates that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dgc_horovod.kernels.composed import ListedGradients
from dgc_horovod.kernels.contract import (
    AccumulateResult,
    Accumulation,
    Elements,
    MomentumCorrection,
    SharedMoment,
    State,
)
from dgc_horovod.kernels.triton.accumulate import (
    BAD_GRADIENT,
    BAD_RESIDUAL,
    BINS,
    BLOCK,
    BOUND,
    FACTORS,
    FLAGS,
    MOMENTUM,
    MOMENTUM_FEED,
    NESTEROV_FEED,
    NOTED,
    RESIDUAL_FEED,
    SCALE,
    SHARED_FEED,
    WARPS,
    accumulate,
)
from dgc_horovod.kernels.triton.encode import HEADER_WORDS
from dgc_horovod.kernels.triton.memory import EXACT, BucketMap, Upload, addresses, bits_of, is_narrow
from dgc_horovod.wire.bucket import Bucket

REPORT, HISTOGRAM = 16, BINS.value  # int32 words
_NUMBERS = 16


def _described(accumulation: Accumulation) -> tuple[int, dict[int, float]]:
    """Which form of `accumulate` a feed needs, and its numbers."""
    if isinstance(accumulation, MomentumCorrection) and accumulation.momentum:
        return (NESTEROV_FEED if accumulation.nesterov else MOMENTUM_FEED).value, {
            MOMENTUM.value: accumulation.momentum
        }
    if isinstance(accumulation, SharedMoment):
        return SHARED_FEED.value, {BOUND.value: accumulation.bound}
    return RESIDUAL_FEED.value, {}


def _factors(accumulation: Accumulation) -> tuple[int, ...]:
    """What the device is told of a shared second moment."""
    if not isinstance(accumulation, SharedMoment):
        return (0,) * FACTORS.value
    rows, columns = accumulation.rows, accumulation.columns
    return rows.data_ptr(), columns.data_ptr(), len(columns), accumulation.offset


def alike(gradients: ListedGradients) -> bool:
    """Whether all of them enter the residual in the same way, as one pass takes them."""
    accumulations = gradients.accumulations
    how: list[Any] = [each.bound if isinstance(each, SharedMoment) else each for each in accumulations]
    return how.count(how[0]) == len(how)


class Form(NamedTuple):
    """Which of the forms of `accumulate` a step takes: how gradients enter, and whether they lie on the grid."""

    feed: int
    aligned: bool


class BucketPass:
    """`accumulate` for one bucket, and its memory.

    Args:
        bucket: layout of the bucket.
        device: device that holds u and v.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        self.bucket, self.device = bucket, device
        self.map = BucketMap(bucket, BLOCK.value, device)
        segments = len(bucket.segments)
        self.settings = Upload(
            device,
            {
                "gradients": (torch.int64, segments),
                "factors": (torch.int64, FACTORS.value * segments),
                "thresholds": (torch.float32, segments),
                "numbers": (torch.float32, _NUMBERS),
                "header": (torch.int32, HEADER_WORDS.value),  # of a packet, if one is written
            },
        )
        self.bases, self.counts = (torch.empty(self.map.blocks, dtype=torch.int32, device=device) for _ in range(2))
        self.max_candidates = -1
        self.make_room(0)

    def make_room(self, max_candidates: int) -> None:
        """Have memory for that many candidates."""
        if max_candidates != self.max_candidates:
            self.max_candidates = max_candidates
            self.positions = torch.empty(max(max_candidates, 1), dtype=torch.int32, device=self.device)
            self.values = torch.empty(max(max_candidates, 1), dtype=torch.float32, device=self.device)

    def prepare(self, gradients: ListedGradients, scale: float, thresholds: Sequence[float]) -> Form:
        """Send the device what is new at this step; all gradients must have the same feed.

        Args:
            gradients, scale: see `Kernels.accumulate`; gradients stay until the device has read them.
            thresholds: smallest magnitude that makes a candidate, one a segment; infinity: none.
        """
        feed, numbers = _described(gradients.accumulations[0])
        host = self.settings.host
        host["gradients"][:] = addresses(gradients.arrays)
        if feed == SHARED_FEED.value:
            host["factors"][:] = np.ravel([_factors(each) for each in gradients.accumulations])
        aligned = self.map.aligned and not (host["gradients"] % 16).any()
        host["thresholds"][:] = thresholds
        host["numbers"][SCALE.value] = scale
        for place, number in numbers.items():
            host["numbers"][place] = number
        self.settings.send()
        return Form(feed, aligned)

    def launch(self, form: Form, state: State, report: torch.Tensor, histogram: torch.Tensor) -> None:
        """Start the pass.

        Args:
            form: from `prepare`.
            state: see `Kernels.accumulate`.
            report, histogram: int32 zeros, REPORT and HISTOGRAM of them, for what is seen.
        """
        u = state.v if state.u is None else bits_of(state.u)
        given = self.settings.device
        accumulate[(self.map.blocks,)](
            state.v, u, given["gradients"], given["factors"], self.map.starts, self.map.spread, given["thresholds"],
            given["numbers"], report, self.positions,
            self.values, self.bases, self.counts, histogram, self.bucket.numel, self.max_candidates,
            FEED=form.feed, ALIGNED=form.aligned, NARROW=is_narrow(state.u), num_warps=WARPS,
            **EXACT,
        )  # fmt: skip

    def candidates(self, num_candidates: int) -> Elements | None:
        """The candidates, on the host, by ascending position; None if there was no room for them."""
        if num_candidates > self.max_candidates:
            return None
        positions, order = torch.sort(self.positions[:num_candidates])
        return Elements(positions.cpu().numpy(), self.values[:num_candidates][order].cpu().numpy())


def thresholds_of(bucket: Bucket, ranges: np.ndarray) -> list[float]:
    """For each segment the candidate threshold of its range."""
    starts = [segment.start for segment in bucket.segments]
    at = np.searchsorted(ranges["start"], starts, side="right") - 1
    return [float(candidate_threshold) for candidate_threshold in ranges["threshold"][at]]


def seen(report: np.ndarray, candidates: Callable[[int], Elements | None]) -> AccumulateResult:
    """What a pass saw, from its report on the host; `candidates` is asked only if nothing was wrong."""
    flags, num_candidates = int(report[FLAGS.value]), int(report[NOTED.value])
    found = None if flags else candidates(num_candidates)
    return AccumulateResult(not flags & BAD_GRADIENT.value, not flags & BAD_RESIDUAL.value, num_candidates, found)
