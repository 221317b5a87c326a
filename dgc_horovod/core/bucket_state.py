"""The state of one bucket on one rank (u, v, remainder), read and written tensor by tensor."""

from __future__ import annotations

import numpy as np

from dgc_horovod.exchange.sharded import Shards
from dgc_horovod.kernels.contract import Array, Elements, Kernels, State
from dgc_horovod.state.residual_state import MOMENTUM, REMAINDER, RESIDUAL, Arrays
from dgc_horovod.wire.bucket import Bucket


class BucketState(State):
    """The residual v, the momentum u from its first use on, and the remainder of a shard owner.

    Like the residual, the remainder has not been applied yet. If this rank no longer owns its elements, the remainder
    is added to the residual.

    Args:
        bucket: layout of the bucket.
        kernels: backend on the device that holds the gradients.
        rank: index of this worker among those that exchange the bucket.
        shards: assignment of elements to shard owners; None without owners.

    Memory: v, 4 bytes an element; with momentum 4 more; 4 for each element of a shard.
    """

    def __init__(self, bucket: Bucket, kernels: Kernels, rank: int = 0, shards: Shards | None = None) -> None:
        super().__init__(kernels.new(bucket.numel))
        self._bucket, self._kernels, self._rank, self._shards = bucket, kernels, rank, shards

    def clear(self) -> None:
        """Set the residual, the momentum and the remainder to zero."""
        self._kernels.fill_zero(self.v)
        self.u = self.remainder = None

    def release_remainder(self) -> None:
        """Add the remainder to the residual."""
        if self.remainder is not None:
            self.v[:] += self._kernels.from_host(self._owed(slice(0, self._bucket.numel)))
            self.remainder = None

    def _owed(self, place: slice) -> np.ndarray:
        """Return the remainder of the elements of `place`, on the host; zeros where another rank is the owner."""
        found = np.zeros(place.stop - place.start, np.float32)
        if self.remainder is not None:
            mine, positions = self._owned(place)
            found[mine] = self._kernels.take(self.remainder, positions)
        return found

    def _owe(self, place: slice, owed: np.ndarray) -> None:
        """Set the remainder of the elements of `place` to `owed`; add those of other owners to the residual."""
        mine, positions = self._owned(place)
        if self._shards is not None:
            if self.remainder is None:
                self.remainder = self._kernels.new(self._shards.size)
            self._kernels.put(self.remainder, Elements(positions, owed[mine]))
        self.v[place] += self._kernels.from_host(np.where(mine, np.float32(0), owed))

    def _owned(self, place: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return a mask of the elements of `place` that this rank owns, and their positions in its shard."""
        if self._shards is None:
            return np.zeros(place.stop - place.start, bool), np.empty(0, np.int32)
        owners, positions = self._shards.dealt(np.arange(place.start, place.stop, dtype=np.int32))
        mine = owners == self._rank
        return mine, positions[mine]

    def momentum(self) -> Array:
        """Return the momentum u of the bucket; it is allocated at first use."""
        if self.u is None:
            self.u = self._kernels.new(self._bucket.numel)
        return self.u

    def add_momentum(self, i: int, values: np.ndarray) -> None:
        """Add `values` to the momentum of segment i, float32 of its size on the host."""
        u = self.momentum()[self._bucket.segments[i].place]
        u += self._kernels.from_host(values)

    def move_in(self, i: int, other: BucketState, j: int) -> None:
        """Move the state of segment j of `other` to segment i."""
        self.write(i, other.read(j))
        other.write(j, {})

    def read(self, i: int) -> Arrays:
        """Copy the state of segment i to the host: "v", and "u" and "remainder" if they exist."""
        place, parts = self._bucket.segments[i].place, self._arrays()
        found = {name: self._kernels.to_host(x[place]).copy() for name, x in parts.items() if x is not None}
        if self.remainder is not None:
            found[REMAINDER] = self._owed(place)
        return found

    def write(self, i: int, arrays: Arrays) -> None:
        """Set the state of segment i to the result of `read`; parts that are missing become zero."""
        if MOMENTUM in arrays:
            self.momentum()
        place = self._bucket.segments[i].place
        for name, x in self._arrays().items():
            if x is not None:
                if name in arrays:
                    self._kernels.write(x[place], arrays[name])
                else:
                    self._kernels.fill_zero(x[place])
        if REMAINDER in arrays:
            self._owe(place, arrays[REMAINDER])
        elif self.remainder is not None:
            self._owe(place, np.zeros(place.stop - place.start, np.float32))

    def rescale(self, factor: float) -> None:
        """Multiply u, v and the remainder by `factor`."""
        for x in (self.v, self.u, self.remainder):
            if x is not None:
                x *= factor

    def fade(self, i: int, factor: float) -> None:
        """Multiply the residual of segment i by `factor`, in [0, 1]; the rest is never sent."""
        place = self._bucket.segments[i].place
        self.v[place] *= factor
        if self.remainder is not None:
            self._owe(place, self._owed(place) * np.float32(factor))

    def full_vector(self, part: str) -> np.ndarray:
        """Copy one part of the bucket to the host, zeros if there is none; the residual includes the remainder."""
        kept = self._arrays()[part]
        if kept is None:
            return np.zeros(self._bucket.numel, np.float32)
        found = self._kernels.to_host(kept).copy()
        return found + self._owed(slice(0, self._bucket.numel)) if part == RESIDUAL else found

    @property
    def parts(self) -> list[str]:
        """Names of the parts that exist, for `full_vector`."""
        return [name for name, x in self._arrays().items() if x is not None]

    def _arrays(self) -> dict[str, Array | None]:
        return {RESIDUAL: self.v, MOMENTUM: self.u}
