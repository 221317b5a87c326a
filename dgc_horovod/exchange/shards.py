"""Which worker owns which elements of a bucket: chunks are dealt round-robin, so no large layer is one's alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dgc_horovod.kernels.contract import CHUNK

_CHUNKS = 8  # of each owner, where a bucket is too small for whole ones


@dataclass(frozen=True)
class Shards:
    """A bucket's elements among N owners. All shards have the same size; what is beyond the bucket is never used.

    Args:
        numel: number of elements in the bucket, >= 1.
        workers: N >= 1.
    """

    numel: int
    workers: int

    @cached_property
    def chunk(self) -> int:
        """Number of elements dealt together."""
        return min(CHUNK, max(1, self.numel // (_CHUNKS * self.workers)))

    @cached_property
    def size(self) -> int:
        """Number of elements of a shard."""
        chunks = -(-self.numel // self.chunk)
        return -(-chunks // self.workers) * self.chunk

    def dealt(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Owner of each element, and its position in the shard: ascending within a shard where `positions` are.

        Args:
            positions: positions in the bucket, int32.
        """
        numbers, within = np.divmod(positions, np.int32(self.chunk))
        rows, owners = np.divmod(numbers, np.int32(self.workers))
        return owners, rows * np.int32(self.chunk) + within

    def in_bucket(self, owner: int, positions: np.ndarray) -> np.ndarray:
        """Positions in the bucket, int64, of those in the shard of `owner`; beyond its end where there is no element.

        Args:
            owner: index of the owner, 0 <= owner < workers.
            positions: positions in its shard, int32.
        """
        rows, within = np.divmod(positions.astype(np.int64), self.chunk)
        return (rows * self.workers + owner) * self.chunk + within
