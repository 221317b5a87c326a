"""The kernel contract: what every backend must do, bit for bit as `reference` does it.

Arithmetic rules, so that backends, instruction sets and thread counts agree exactly:

* float32 state; every product is rounded before it is added (no fused multiply-add);
* hyper-parameters are rounded to float32 before use;
* sums are taken in float64 over the fixed tree described in `Kernels.sums`;
* denormals are kept (gradual underflow), never flushed.

An ``Array`` is the backend's own flat float32 vector (NumPy array, torch tensor). Positions and the
values at them cross the contract as NumPy arrays on the host: there are only k of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = Any

CHUNK = 4096
LANES = 16


class Kernels(Protocol):
    """One backend on one device. All methods that change an array change it in place."""

    name: str
    array_kind: str  # "numpy" or "torch": what an Array is

    def new(self, numel: int) -> Array:
        """A zero vector of `numel` float32."""

    def all_finite(self, x: Array) -> bool:
        """Whether `x` holds neither NaN nor infinity. One read of x."""

    def sums(self, x: Array) -> tuple[float, float]:
        """Sum and sum of squares of `x` in float64, in one fixed order.

        x is cut into chunks of 4,096 (the last one filled with zeros), a chunk into 256 rows of 16
        lanes. Neighbouring rows are added pairwise until one is left, then the upper half of the lanes
        is added to the lower until one is left; the chunks' sums are added pairwise, neighbours first,
        an odd last one with zero. Squares of float32 are exact in float64 and cannot overflow, so the
        second sum is finite if and only if x is. One read of x.
        """

    def accumulate_residual(self, v: Array, g: Array, scale: float) -> None:
        """``v += scale*g`` (TopK-SGD). Reads g, v; writes v."""

    def accumulate_momentum(self, u: Array, v: Array, g: Array, scale: float, momentum: float, nesterov: bool) -> None:
        """``u = m*u + scale*g``; ``v += u``, or with Nesterov ``v += scale*g; v += m*u`` (DGC 3.1).

        Reads g, u, v; writes u, v: 20 bytes an element.
        """

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
        """Adam's direction on the local gradient, added to v.

        ``first = b1*first + (1-b1)*g; second = b2*second + (1-b2)*g*g;``
        ``v += (first / (1-b1**step)) / (sqrt(second) / sqrt(1-b2**step) + eps)``. `step` counts from 1.
        """

    def count_at_least(self, x: Array, threshold: float) -> int:
        """How many elements have ``|x| >= threshold``. One read of x."""

    def positions_at_least(self, x: Array, threshold: float) -> np.ndarray:
        """Ascending int64 positions of the non-zero elements with ``|x| >= threshold``. One read of x."""

    def top_k(self, x: Array, k: int) -> np.ndarray:
        """Ascending positions of the k largest ``|x|``; ties go to the lower position; zeros never."""

    def sample(self, x: Array, start: int, stride: int) -> np.ndarray:
        """Magnitudes of ``x[start::stride]``, on the host."""

    def take(self, x: Array, positions: np.ndarray) -> np.ndarray:
        """The float32 values at `positions`, on the host."""

    def put(self, x: Array, positions: np.ndarray, values: np.ndarray | float) -> None:
        """``x[positions] = values``."""

    def add_at(self, x: Array, positions: np.ndarray, values: np.ndarray) -> None:
        """``x[positions] += values``; the positions are unique, so the order does not matter."""

    def fill_zero(self, x: Array) -> None:
        """``x = 0``."""

    def copy_scaled(self, x: Array, source: Array, scale: float) -> None:
        """``x = source * scale``."""

    def to_host(self, x: Array) -> np.ndarray:
        """`x` as a NumPy array; a view where the memory is the host's."""

    def from_host(self, values: np.ndarray) -> Array:
        """A host float32 vector as an Array; a view where the memory is the host's."""
