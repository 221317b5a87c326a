"""A bucket's kernels composed of one-vector primitives, shared by the reference and torch_eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dgc_horovod.kernels.contract import (
    CHUNK,
    AccumulateResult,
    Accumulation,
    Array,
    Elements,
    ErrorFeedback,
    Kernels,
    MomentumCorrection,
    SharedMoment,
    State,
    joined,
)
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import Coder, NumpyCoder

SIGN_STRIDE = 7919  # from the first sign of a row to that of the next


def first_sign(row: Array, columns: int) -> Array:
    """Return the index of a row's first sign in `Kernels.measure`; rows have different ones, as they may be equal."""
    return row * SIGN_STRIDE % columns


def sum_stride(chunks: int) -> int:
    """Return the distance between two summed chunks: 1 below 128 chunks, then ``chunks // 64``, at most 16."""
    return 1 if chunks < 128 else min(chunks // 64, 16)


def summed_numel(numel: int) -> int:
    """Return how many of `numel` elements are in the chunks that `Kernels.sampled_sums` reads."""
    chunks = -(-numel // CHUNK)
    seen = range(0, chunks, sum_stride(chunks))
    last_seen = bool(seen) and seen[-1] == chunks - 1
    return len(seen) * CHUNK - (chunks * CHUNK - numel if last_seen else 0)


class ListedOutputs:
    """`contract.Outputs` as a list."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.arrays: list[Array | None] = [None] * len(bucket.segments)

    def put(self, i: int, output: Array) -> None:
        self.arrays[i] = output

    def clear(self) -> None:
        self.arrays = [None] * len(self.arrays)


class ListedGradients:
    """`contract.Gradients` as lists."""

    def __init__(self, bucket: Bucket, kernels: Kernels) -> None:
        self.bucket, self._kernels = bucket, kernels
        self.arrays: list[Array | None] = [None] * len(bucket.segments)
        self.accumulations: list[Accumulation] = [ErrorFeedback()] * len(bucket.segments)

    def put(self, i: int, gradient: Array, accumulation: Accumulation) -> None:
        self.arrays[i], self.accumulations[i] = gradient, accumulation

    def squared_norm(self) -> float:
        return self._kernels.squares(self.arrays)


class ComposedKernels(Kernels, Protocol):
    """The methods of `Kernels` on whole buckets, composed of operations on one vector, which a backend adds."""

    coder: Coder = NumpyCoder()

    # -- operations on one vector, in place; see `contract` for the arithmetic rules

    def all_finite(self, x: Array) -> bool:
        """Return whether `x` has neither NaN nor infinity."""

    def spread(self, x: Array, index: np.ndarray) -> Array:
        """``x[index]``, int64 on the host."""

    def zero_unless_finite(self, x: Array) -> Array:
        """Return a copy of `x` with zero for elements that are not finite."""

    def chunks(self, x: Array, stride: int) -> Array:
        """Return a copy of every `stride`-th chunk of `x`."""

    def accumulate_residual(self, v: Array, g: Array, scale: float) -> None:
        """``v += scale*g``."""

    def accumulate_momentum(self, u: Array, v: Array, g: Array, scale: float, momentum: float, nesterov: bool) -> None:
        """As `MomentumCorrection`."""

    def accumulate_shared(self, v: Array, g: Array, scale: float, rows: Array, columns: Array, bound: float) -> None:
        """As `SharedMoment`, with the row's and column's factors spread to every element."""

    def positions_at_least(self, x: Array, threshold: float) -> np.ndarray:
        """Return ascending int32 positions of the non-zero elements with ``|x| >= threshold``."""

    def top_positions(self, x: Array, k: int) -> np.ndarray:
        """Return ascending int32 positions of the k largest ``|x|``; ties go to the lower position; zeros never."""

    def add_at(self, x: Array, positions: np.ndarray, values: np.ndarray) -> None:
        """``x[positions] += values``; the positions are unique."""

    def copy_scaled(self, x: Array, source: Array, scale: float) -> None:
        """``x = source * scale``."""

    # -- the methods of `Kernels`

    def gradients(self, bucket: Bucket) -> ListedGradients:
        return ListedGradients(bucket, self)

    def accumulate(
        self,
        gradients: ListedGradients,
        state: State,
        scale: float,
        ranges: np.ndarray,
        max_candidates: int,
        want_sums: bool,
    ) -> AccumulateResult:
        finite = True
        for i, segment in enumerate(gradients.bucket.segments):
            gradient, accumulation = gradients.arrays[i], gradients.accumulations[i]
            if not self.all_finite(gradient):
                finite, gradient = False, self.zero_unless_finite(gradient)
            self._accumulate(state, segment.place, gradient, accumulation, scale)
            gradients.arrays[i] = None
        found = []
        for part in ranges:
            v = state.v[int(part["start"]) : int(part["start"] + part["numel"])]
            if want_sums:
                part["sum"], part["squares"] = self.sampled_sums(v)
            if part["threshold"] < np.inf:
                positions, values = self.at_least(v, float(part["threshold"]))
                found.append(Elements(positions + np.int32(part["start"]), values))
        candidates = joined(found)
        num_candidates = candidates.positions.size
        return AccumulateResult(
            finite, self.all_finite(state.v), num_candidates, candidates if num_candidates <= max_candidates else None
        )

    def _accumulate(self, state: State, here: slice, gradient: Array, accumulation: Accumulation, scale: float) -> None:
        v = state.v[here]
        if isinstance(accumulation, SharedMoment):
            at = np.arange(accumulation.offset, accumulation.offset + len(v))
            row, column = np.divmod(at, len(accumulation.columns))
            rows, columns = self.spread(accumulation.rows, row), self.spread(accumulation.columns, column)
            self.accumulate_shared(v, gradient, scale, rows, columns, accumulation.bound)
        elif isinstance(accumulation, MomentumCorrection) and accumulation.momentum:
            assert state.u is not None
            self.accumulate_momentum(state.u[here], v, gradient, scale, accumulation.momentum, accumulation.nesterov)
        else:
            self.accumulate_residual(v, gradient, scale)

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

    def update_residual(self, state: State, elements: Elements, decoded: np.ndarray, masked: np.ndarray | None) -> None:
        positions = elements.positions
        self.put(state.v, Elements(positions, elements.values - decoded))
        if masked is not None:
            masked[:] = self.take(state.u, positions)
            self.put(state.u, Elements(positions, np.zeros(positions.size, np.float32)))

    def outputs(self, bucket: Bucket) -> ListedOutputs:
        return ListedOutputs(bucket)

    def aggregate_into(
        self, outputs: ListedOutputs, contributions: Sequence[Elements], scale: float, fresh: bool
    ) -> bool:
        finite = True
        for output, segment in zip(outputs.arrays, outputs.bucket.segments, strict=True):
            if fresh:
                self.fill_zero(output)
            for positions, values in contributions:
                low, high = np.searchsorted(positions, [segment.place.start, segment.place.stop])
                here = positions[low:high] - np.int32(segment.start)
                self.add_at(output, here, values[low:high] * np.float32(scale))
                finite = finite and bool(np.isfinite(self.take(output, here)).all())
        return finite

    def aggregate_dense(self, outputs: ListedOutputs, summed: Array, scale: float) -> bool:
        for output, segment in zip(outputs.arrays, outputs.bucket.segments, strict=True):
            self.copy_scaled(output, summed[segment.place], scale)
        return all(self.all_finite(output) for output in outputs.arrays)
