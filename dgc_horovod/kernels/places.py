"""Which chunks and which signs every backend takes, by number alone."""

from __future__ import annotations

from typing import Any

from dgc_horovod.kernels.contract import CHUNK


def first_sign(row: Any, columns: int) -> Any:
    """Where the signs of a row begin in `Kernels.measure`: elsewhere for each, or rows that are alike had one sign."""
    return row * 7919 % columns


def sum_stride(chunks: int) -> int:
    """Distance between two summed chunks: 1 below 128 chunks, then ``chunks // 64``, at most 16."""
    return 1 if chunks < 128 else min(chunks // 64, 16)


def summed_numel(numel: int) -> int:
    """How many of `numel` elements are in the chunks that `Kernels.sampled_sums` looks at."""
    chunks = -(-numel // CHUNK)
    seen = range(0, chunks, sum_stride(chunks))
    last_seen = bool(seen) and seen[-1] == chunks - 1
    return len(seen) * CHUNK - (chunks * CHUNK - numel if last_seen else 0)
