"""A bucket's kernels put together from one-tensor primitives: what the reference and torch_eager share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dgc_horovod.kernels.contract import (
    CHUNK,
    AdamFeed,
    Array,
    Elements,
    Feed,
    MomentumFeed,
    Receiver,
    ResidualFeed,
    Seen,
    Sender,
    State,
    joined,
    sum_stride,
)
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import Coder, NumpyCoder, PacketFormat


class ListedTargets:
    """`schema.Targets` as a list."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.arrays: list[Array | None] = [None] * len(bucket.segments)

    def put(self, i: int, target: Array, cleared: bool = False) -> None:
        self.arrays[i] = target

    def clear(self) -> None:
        self.arrays = [None] * len(self.arrays)


class Primitives(Protocol):
    """What a backend does on one vector; vectors are changed in place. See `schema` for the arithmetic rules."""

    def new(self, numel: int) -> Array: ...
    def to_host(self, x: Array) -> np.ndarray: ...
    def from_host(self, values: np.ndarray) -> Array: ...
    def fill_zero(self, x: Array) -> None: ...
    def take(self, x: Array, positions: np.ndarray) -> np.ndarray: ...
    def put(self, x: Array, elements: Elements) -> None: ...
    def sums(self, x: Array) -> tuple[float, float]: ...
    def squares(self, arrays: Sequence[Array]) -> float: ...
    def count_at_least(self, x: Array, threshold: float) -> int: ...
    def sample(self, x: Array, start: int, stride: int) -> np.ndarray: ...

    def all_finite(self, x: Array) -> bool:
        """Whether `x` holds neither NaN nor infinity."""

    def zero_unless_finite(self, x: Array) -> Array:
        """A copy of `x` with zero in place of what is not finite."""

    def chunks(self, x: Array, stride: int) -> Array:
        """A copy of every `stride`-th chunk of `x`."""

    def accumulate_residual(self, v: Array, g: Array, scale: float) -> None:
        """``v += scale*g``."""

    def accumulate_momentum(self, u: Array, v: Array, g: Array, scale: float, momentum: float, nesterov: bool) -> None:
        """As `MomentumFeed`."""

    def accumulate_adam(
        self,
        first: Array,
        second: Array,
        v: Array,
        g: Array,
        scale: float,
        betas: tuple[float, float],
        eps: float,
        step: int,
    ) -> None:
        """As `AdamFeed`."""

    def positions_at_least(self, x: Array, threshold: float) -> np.ndarray:
        """Ascending int32 positions of the non-zero elements with ``|x| >= threshold``."""

    def top_positions(self, x: Array, k: int) -> np.ndarray:
        """Ascending int32 positions of the k largest ``|x|``; ties go to the lower position; zeros never."""

    def add_at(self, x: Array, positions: np.ndarray, values: np.ndarray) -> None:
        """``x[positions] += values``; the positions are unique."""

    def copy_scaled(self, x: Array, source: Array, scale: float) -> None:
        """``x = source * scale``."""


class ListedGradients:
    """`schema.Gradients` as lists."""

    def __init__(self, bucket: Bucket, kernels: Primitives) -> None:
        self.bucket, self._kernels = bucket, kernels
        self.arrays: list[Array | None] = [None] * len(bucket.segments)
        self.feeds: list[Feed] = [ResidualFeed()] * len(bucket.segments)
        self.clears = [False] * len(bucket.segments)

    def put(self, i: int, gradient: Array, feed: Feed, clears: bool = False) -> None:
        self.arrays[i], self.feeds[i], self.clears[i] = gradient, feed, clears

    def squared_norm(self) -> float:
        return self._kernels.squares(self.arrays)


class ComposedKernels(Primitives, Protocol):
    """The methods of `schema.Kernels` on whole buckets, by way of the primitives, which a backend adds."""

    coder: Coder = NumpyCoder()

    def gradients(self, bucket: Bucket) -> ListedGradients:
        return ListedGradients(bucket, self)

    def take_in(
        self, gradients: ListedGradients, state: State, scale: float, spans: np.ndarray, room: int, want_sums: bool
    ) -> Seen:
        finite = True
        for i, segment in enumerate(gradients.bucket.segments):
            gradient, feed = gradients.arrays[i], gradients.feeds[i]
            if not self.all_finite(gradient):
                finite, gradient = False, self.zero_unless_finite(gradient)
            self._accumulate(state, segment.place, gradient, feed, scale)
            if gradients.clears[i]:
                self.fill_zero(gradients.arrays[i])
            gradients.arrays[i] = None
        found = []
        for span in spans:
            v = state.v[int(span["start"]) : int(span["start"] + span["numel"])]
            if want_sums:
                span["sum"], span["squares"] = self.sampled_sums(v)
            if span["floor"] < np.inf:
                positions, values = self.at_least(v, float(span["floor"]))
                found.append(Elements(positions + np.int32(span["start"]), values))
        candidates = joined(found)
        noted = candidates.positions.size
        return Seen(finite, self.all_finite(state.v), noted, candidates if noted <= room else None)

    def _accumulate(self, state: State, here: slice, gradient: Array, feed: Feed, scale: float) -> None:
        v = state.v[here]
        if isinstance(feed, AdamFeed):
            assert state.moments is not None
            first, second = (moment[here] for moment in state.moments)
            self.accumulate_adam(first, second, v, gradient, scale, feed.betas, feed.eps, feed.step)
        elif isinstance(feed, MomentumFeed) and feed.momentum:
            assert state.u is not None
            self.accumulate_momentum(state.u[here], v, gradient, scale, feed.momentum, feed.nesterov)
        else:
            self.accumulate_residual(v, gradient, scale)

    def squares(self, arrays: Sequence[Array]) -> float:
        return sum((self.sums(x)[1] for x in arrays), 0.0)

    def sampled_sums(self, x: Array) -> tuple[float, float]:
        stride = sum_stride(-(-len(x) // CHUNK))
        return self.sums(x if stride == 1 else self.chunks(x, stride))

    def at_least(self, x: Array, threshold: float) -> Elements:
        positions = self.positions_at_least(x, threshold)
        return Elements(positions, self.take(x, positions))

    def top_k(self, x: Array, k: int) -> Elements:
        positions = self.top_positions(x, k)
        return Elements(positions, self.take(x, positions))

    def keep_largest(self, elements: Elements, k: int) -> Elements:
        if elements.positions.size <= k:
            return self.keep_at_least(elements, 0.0)
        kept = self.top_positions(self.from_host(elements.values), k)
        return Elements(elements.positions[kept], elements.values[kept])

    def keep_at_least(self, elements: Elements, threshold: float) -> Elements:
        kept = (np.abs(elements.values) >= np.float32(threshold)) & (elements.values != 0)
        return Elements(elements.positions[kept], elements.values[kept])

    def kth_largest(self, values: np.ndarray, k: int) -> float:
        return float(np.partition(np.abs(values), values.size - k)[values.size - k])

    def settle(self, state: State, elements: Elements, decoded: np.ndarray, masked: np.ndarray | None) -> None:
        positions = elements.positions
        self.put(state.v, Elements(positions, elements.values - decoded))
        if masked is not None:
            masked[:] = self.take(state.u, positions)
            self.put(state.u, Elements(positions, np.zeros(positions.size, np.float32)))

    def targets(self, bucket: Bucket) -> ListedTargets:
        return ListedTargets(bucket)

    def fill(self, targets: ListedTargets, contributions: Sequence[Elements], scale: float, fresh: bool) -> bool:
        finite = True
        for target, segment in zip(targets.arrays, targets.bucket.segments, strict=True):
            if fresh:
                self.fill_zero(target)
            for positions, values in contributions:
                low, high = np.searchsorted(positions, [segment.place.start, segment.place.stop])
                here = positions[low:high] - np.int32(segment.start)
                self.add_at(target, here, values[low:high] * np.float32(scale))
                finite = finite and bool(np.isfinite(self.take(target, here)).all())
        return finite

    def fill_summed(self, targets: ListedTargets, summed: Array, scale: float) -> bool:
        for target, segment in zip(targets.arrays, targets.bucket.segments, strict=True):
            self.copy_scaled(target, summed[segment.place], scale)
        return all(self.all_finite(target) for target in targets.arrays)

    def sender(self, bucket: Bucket, wire: PacketFormat, room: int) -> Sender | None:
        return None

    def receiver(self, bucket: Bucket, wire: PacketFormat, ranks: int) -> Receiver | None:
        return None
