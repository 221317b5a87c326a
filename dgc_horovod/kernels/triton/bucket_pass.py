"""The pass over a bucket in Triton: what the host prepares for it, and the candidates that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dgc_horovod.kernels.composed import ListedGradients
from dgc_horovod.kernels.contract import (
    AccumulateResult,
    Accumulation,
    AdamCorrection,
    Elements,
    MomentumCorrection,
    State,
)
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
    FROZEN_ADAM_FEED,
    MOMENTUM,
    MOMENTUM_FEED,
    NESTEROV_FEED,
    NOTED,
    RESIDUAL_FEED,
    REST1,
    REST2,
    SCALE,
    WARPS,
    accumulate,
)
from dgc_horovod.kernels.triton.encode import HEADER_WORDS
from dgc_horovod.kernels.triton.memory import EXACT, BucketMap, Upload, addresses, bits_of, is_narrow
from dgc_horovod.wire.bucket import Bucket

REPORT, HISTOGRAM = 16, BINS.value  # int32 words
_NUMBERS = 16
_ADAM_FEEDS = (ADAM_FEED.value, FROZEN_ADAM_FEED.value)


def _described(accumulation: Accumulation) -> tuple[int, dict[int, float]]:
    """Which form of `accumulate` a feed needs, and its numbers."""
    if isinstance(accumulation, AdamCorrection):
        b1, b2 = accumulation.betas
        biases = {
            BIAS1.value: accumulation.correction1, BIAS2.value: accumulation.root2, EPSILON.value: accumulation.eps
        }  # fmt: skip
        betas = {BETA1.value: b1, REST1.value: 1 - b1, BETA2.value: b2, REST2.value: 1 - b2}
        return (FROZEN_ADAM_FEED if accumulation.frozen else ADAM_FEED).value, {**betas, **biases}
    if isinstance(accumulation, MomentumCorrection) and accumulation.momentum:
        return (NESTEROV_FEED if accumulation.nesterov else MOMENTUM_FEED).value, {
            MOMENTUM.value: accumulation.momentum
        }
    return RESIDUAL_FEED.value, {}


def alike(gradients: ListedGradients) -> bool:
    """Whether all of them enter the residual in the same way, as one pass takes them."""
    accumulations = gradients.accumulations
    return accumulations.count(accumulations[0]) == len(accumulations) and not any(gradients.clears)


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
        moments = state.moments if form.feed in _ADAM_FEEDS else None
        first, second = moments or (bits_of(state.u), None)
        unused = state.v
        given = self.settings.device
        accumulate[(self.map.blocks,)](
            state.v, unused if first is None else first, unused if second is None else second, given["gradients"],
            self.map.starts, self.map.spread, given["thresholds"], given["numbers"], report, self.positions,
            self.values, self.bases, self.counts, histogram, self.bucket.numel, self.max_candidates,
            FEED=form.feed, ALIGNED=form.aligned, NARROW=moments is None and is_narrow(state.u), num_warps=WARPS,
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
