"""Which worker owns which elements of a bucket: chunks are dealt round-robin, so no large layer is one's alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Elements dealt together. What is selected comes in rows and columns of a layer: with so few, and a number that no
# layer's width is a multiple of, hardly any owner has more than its share (decision 43).
CHUNK = 7


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
    def size(self) -> int:
        """Number of elements of a shard, those beyond the bucket's end included."""
        chunks = -(-self.numel // CHUNK)
        return -(-chunks // self.workers) * CHUNK

    def dealt(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Owner of each element, and its position in the shard: ascending within a shard where `positions` are.

        Args:
            positions: positions in the bucket, int32.
        """
        numbers, within = np.divmod(positions, np.int32(CHUNK))
        rows, owners = np.divmod(numbers, np.int32(self.workers))
        return owners, rows * np.int32(CHUNK) + within

    def in_bucket(self, owner: int, positions: np.ndarray) -> np.ndarray:
        """Positions in the bucket, int64, of those in the shard of `owner`; beyond its end where there is no element.

        Args:
            owner: index of the owner, 0 <= owner < workers.
            positions: positions in its shard, int32.
        """
        rows, within = np.divmod(positions.astype(np.int64), CHUNK)
        return (rows * self.workers + owner) * CHUNK + within
