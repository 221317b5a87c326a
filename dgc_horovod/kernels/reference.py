"""The kernels in NumPy: short and slow; every other backend is tested against them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dgc_horovod.kernels.composed import ComposedKernels, first_sign
from dgc_horovod.kernels.contract import CHUNK, LANES, Elements


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
    sums = lanes[:, 0]
    while sums.size > 1:
        sums = np.append(sums, 0.0) if sums.size % 2 else sums
        sums = sums[0::2] + sums[1::2]
    return float(sums[0]) if sums.size else 0.0


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
