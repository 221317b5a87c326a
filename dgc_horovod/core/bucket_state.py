"""What one rank keeps of one bucket from step to step, read and written tensor by tensor."""

from __future__ import annotations

import numpy as np

from dgc_horovod.kernels.contract import Array, Kernels, State
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, PARTS, Arrays
from dgc_horovod.wire.bucket import Bucket


class BucketState(State):
    """The residual v, and the momentum u or Adam's two moments from their first use on.

    Args:
        bucket: layout of the bucket.
        kernels: backend on the device that holds the gradients.

    Memory: v, 4 bytes an element; with momentum 4 more, with Adam's moments 8 more.
    """

    def __init__(self, bucket: Bucket, kernels: Kernels) -> None:
        super().__init__(kernels.new(bucket.numel))
        self._bucket, self._kernels = bucket, kernels

    def clear(self) -> None:
        """Empty the residual, the momentum and the moments."""
        self._kernels.fill_zero(self.v)
        self.u = self.moments = None

    def momentum(self) -> Array:
        """The momentum u of the whole bucket, made at first use."""
        if self.u is None:
            self.u = self._kernels.new(self._bucket.numel)
        return self.u

    def adam_moments(self) -> tuple[Array, Array]:
        """First and second local moments of the whole bucket, made at first use."""
        if self.moments is None:
            self.moments = self._kernels.new(self._bucket.numel), self._kernels.new(self._bucket.numel)
        return self.moments

    def move_in(self, i: int, other: BucketState, j: int) -> None:
        """Take over the residual, momentum and moments of segment j of `other` for segment i; there they end."""
        self.write(i, other.read(j))
        other.write(j, {})

    def read(self, i: int) -> Arrays:
        """Copies, on the host, of what is kept of segment i: "v", and "u" or Adam's "first" and "second" if it is."""
        place, parts = self._bucket.segments[i].place, self._parts()
        return {name: self._kernels.to_host(x[place]).copy() for name, x in parts.items() if x is not None}

    def write(self, i: int, arrays: Arrays) -> None:
        """Keep of segment i what `read` gave; what it did not give is zero."""
        if MOMENTUM in arrays:
            self.momentum()
        if FIRST in arrays:
            self.adam_moments()
        place = self._bucket.segments[i].place
        for name, x in self._parts().items():
            if x is not None:
                x[place] = self._kernels.from_host(arrays[name]) if name in arrays else 0

    def rescale(self, factor: float) -> None:
        """Make u and v, or Adam's moments, what they would be, had the first gradient been `factor` times as large."""
        if self.moments is None:
            for x in (self.v, self.u):
                if x is not None:
                    x *= factor
        else:  # v has a direction, which is the same for any size of one gradient
            first, second = self.moments
            first *= factor
            second *= factor * factor

    def fade(self, i: int, factor: float) -> None:
        """Multiply the residual of segment i by `factor`, in [0, 1]: what is faded out is never sent."""
        self.v[self._bucket.segments[i].place] *= factor

    def full_vector(self, part: str) -> np.ndarray:
        """A copy on the host of one part, over the bucket; zeros where it is not kept."""
        kept = self._parts()[part]
        return np.zeros(self._bucket.numel, np.float32) if kept is None else self._kernels.to_host(kept).copy()

    @property
    def parts(self) -> list[str]:
        """What is kept: names of `read`."""
        return [name for name, x in self._parts().items() if x is not None]

    def _parts(self) -> dict[str, Array | None]:
        return dict(zip(PARTS, (self.v, self.u, *(self.moments or (None, None))), strict=True))
