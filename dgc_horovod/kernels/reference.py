"""The kernels in NumPy: short and slow; every other backend is tested against them.

A bucket's kernels are composed of operations on one vector, for the reference and for `torch_eager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from dgc_horovod.kernels.contract import (
    CHUNK,
    LANES,
    NO_ELEMENTS,
    AccumulateResult,
    Accumulation,
    Array,
    Elements,
    ErrorFeedback,
    Kernels,
    MomentumCorrection,
    Search,
    SharedMoment,
    State,
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

    def accumulate(self, gradients: ListedGradients, state: State, scale: float, search: Search) -> AccumulateResult:
        finite = True
        for i, segment in enumerate(gradients.bucket.segments):
            gradient, accumulation = gradients.arrays[i], gradients.accumulations[i]
            if not self.all_finite(gradient):
                finite, gradient = False, self.zero_unless_finite(gradient)
            self._accumulate(state, segment.place, gradient, accumulation, scale)
            gradients.arrays[i] = None
        found = self.at_least(state.v, search.threshold) if search.threshold < np.inf else NO_ELEMENTS
        count = found.positions.size
        fitting = found if count <= search.max_candidates else None
        sums = self.sampled_sums(state.v) if search.wants_sums else None
        return AccumulateResult(finite, self.all_finite(state.v), count, fitting, sums)

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


class NumpyArrays:
    """The methods of `contract.Kernels` on float32 NumPy arrays."""

    array_kind = "numpy"

    def new(self, numel: int) -> np.ndarray:
        return np.zeros(numel, np.float32)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def fetch(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return list(arrays)

    def from_host(self, values: np.ndarray) -> np.ndarray:
        return values

    def write(self, x: np.ndarray, values: np.ndarray) -> None:
        x[...] = values

    def fill_zero(self, x: np.ndarray) -> None:
        x.fill(0)

    def take(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return x[positions]

    def put(self, x: np.ndarray, elements: Elements) -> None:
        x[elements.positions] = elements.values

    def sample(self, x: np.ndarray, start: int, stride: int) -> np.ndarray:
        return np.abs(x[start::stride])


def _scaled(g: np.ndarray, scale: float) -> np.ndarray:
    return g if scale == 1.0 else g * np.float32(scale)


def pairwise(sums: np.ndarray) -> np.ndarray:
    """Add neighbouring rows until one is left, an odd last one with zeros; return it, zeros if there is none."""
    while len(sums) > 1:
        sums = np.concatenate([sums, np.zeros((len(sums) % 2, *sums.shape[1:]))])
        sums = sums[0::2] + sums[1::2]
    return sums[0] if len(sums) else np.zeros(sums.shape[1:])


def _tree_sum(x: np.ndarray) -> float:
    """Sum float64 `x` in the order that `Kernels.sums` defines."""
    filled = np.zeros(-(-x.size // CHUNK) * CHUNK)
    filled[: x.size] = x
    rows = filled.reshape(-1, CHUNK // LANES, LANES)
    while rows.shape[1] > 1:
        rows = rows[:, 0::2] + rows[:, 1::2]
    lanes = rows[:, 0]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return float(pairwise(lanes[:, 0]))


class ReferenceKernels(NumpyArrays, ComposedKernels):
    """`contract.Kernels` on NumPy arrays."""

    name = "reference"
    takes_tensors = False

    def all_finite(self, x: np.ndarray) -> bool:
        return bool(np.isfinite(x).all())

    def zero_unless_finite(self, x: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(x), x, np.float32(0))

    def chunks(self, x: np.ndarray, stride: int) -> np.ndarray:
        return np.concatenate([x[start : start + CHUNK] for start in range(0, x.size, CHUNK * stride)])

    def sums(self, x: np.ndarray) -> tuple[float, float]:
        wide = self.zero_unless_finite(x).astype(np.float64)
        return _tree_sum(wide), _tree_sum(wide * wide)

    def accumulate_residual(self, v: np.ndarray, g: np.ndarray, scale: float) -> None:
        v += _scaled(g, scale)

    def accumulate_momentum(
        self, u: np.ndarray, v: np.ndarray, g: np.ndarray, scale: float, momentum: float, nesterov: bool
    ) -> None:
        m, g = np.float32(momentum), _scaled(g, scale)
        moved = self.to_host(u) * m + g
        self.write(u, moved)
        if nesterov:
            v += g
            v += m * moved
        else:
            v += moved

    def spread(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        return x[index]

    def accumulate_shared(
        self, v: np.ndarray, g: np.ndarray, scale: float, rows: np.ndarray, columns: np.ndarray, bound: float
    ) -> None:
        most = np.float32(bound)
        v += np.clip(_scaled(g, scale) * rows * columns, -most, most)

    def measure(self, x: np.ndarray, offset: int, signs: np.ndarray) -> np.ndarray:
        b = signs.size // 2
        before = offset % b
        whole = np.zeros(-(-(before + x.size) // b) * b)
        whole[before : before + x.size] = x.reshape(-1)
        matrix = whole.reshape(-1, b)
        first = first_sign(offset // b + np.arange(len(matrix)), b)
        products = matrix * signs[first[:, None] + np.arange(b)]
        square = matrix**2
        return np.concatenate([square.sum(1), square.sum(0), products.sum(1)]).astype(np.float32)

    def count_at_least(self, x: np.ndarray, threshold: float) -> int:
        return int(np.count_nonzero(np.abs(x) >= np.float32(threshold)))

    def positions_at_least(self, x: np.ndarray, threshold: float) -> np.ndarray:
        return np.flatnonzero((np.abs(x) >= np.float32(threshold)) & (x != 0)).astype(np.int32)

    def top_positions(self, x: np.ndarray, k: int) -> np.ndarray:
        if k >= np.count_nonzero(x):
            return self.positions_at_least(x, 0.0)
        size = np.abs(x)
        kth = np.partition(size, x.size - k)[x.size - k]
        above = np.flatnonzero(size > kth)
        ties = np.flatnonzero(size == kth)[: k - above.size]
        return np.sort(np.concatenate([above, ties])).astype(np.int32)

    def add_at(self, x: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
        x[positions] += values

    def copy_scaled(self, x: np.ndarray, source: np.ndarray, scale: float) -> None:
        np.multiply(source, np.float32(scale), out=x)
