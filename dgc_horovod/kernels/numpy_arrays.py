"""NumPy arrays as a backend's: float32, or bfloat16 as its bits."""

from __future__ import annotations

import numpy as np

from dgc_horovod.kernels.contract import Elements
from dgc_horovod.wire.bfloat16 import rounded, widened

DTYPES = {"fp32": np.float32, "bf16": np.uint16}


def is_narrow(x: np.ndarray | None) -> bool:
    """Whether it is bfloat16, as its bits."""
    return x is not None and x.dtype == DTYPES["bf16"]


def _as_in(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Float32 values as `x` has them."""
    return rounded(values) if is_narrow(x) else values


class NumpyArrays:
    """What `contract.Kernels` does with its arrays, of the `DTYPES`."""

    array_kind = "numpy"

    def new(self, numel: int, dtype: str = "fp32") -> np.ndarray:
        return np.zeros(numel, DTYPES[dtype])

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return widened(x) if is_narrow(x) else x

    def from_host(self, values: np.ndarray) -> np.ndarray:
        return values

    def write(self, x: np.ndarray, values: np.ndarray) -> None:
        x[...] = _as_in(x, values)

    def fill_zero(self, x: np.ndarray) -> None:
        x.fill(0)

    def take(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.to_host(x[positions])

    def put(self, x: np.ndarray, elements: Elements) -> None:
        x[elements.positions] = _as_in(x, elements.values)

    def sample(self, x: np.ndarray, start: int, stride: int) -> np.ndarray:
        return np.abs(x[start::stride])
