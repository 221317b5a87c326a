"""Triton device code: sums and sums of squares in the one order that `Kernels.sums` fixes.

A program has a chunk; what the chunks' sums come to is added on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.contract import CHUNK, LANES
from dgc_horovod.kernels.triton.accumulate import is_finite

_CHUNK, _LANES = tl.constexpr(CHUNK), tl.constexpr(LANES)


@triton.jit
def _tree(x):
    """Sum of a chunk: neighbouring rows pairwise until one is left, then the upper half of the lanes to the lower."""
    rows: tl.constexpr = _CHUNK // _LANES
    x = tl.reshape(x, [rows, _LANES])
    for level in tl.static_range(0, 8):
        x = tl.sum(tl.reshape(x, [rows >> (level + 1), 2, _LANES]), axis=1)
    x = tl.reshape(x, [_LANES])
    for level in tl.static_range(0, 4):
        x = tl.sum(tl.reshape(x, [2, _LANES >> (level + 1)]), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def chunk_sums(vectors, table, sums):
    """Sum and sum of squares of each chunk, in float64; what is not finite counts as zero.

    Args:
        vectors: address of each vector, int64.
        table: vector of each program, place where it begins there, and number of elements of the vector, int32.
        sums: sum and sum of squares of each program, float64.
    """
    number = tl.program_id(0)
    vector = tl.load(vectors + tl.load(table + 3 * number)).to(tl.pointer_type(tl.float32))
    at = tl.load(table + 3 * number + 1) + tl.arange(0, _CHUNK)
    x = tl.load(vector + at, mask=at < tl.load(table + 3 * number + 2), other=0.0)
    wide = tl.where(is_finite(x), x, 0.0).to(tl.float64)
    tl.store(sums + 2 * number, _tree(wide))
    tl.store(sums + 2 * number + 1, _tree(wide * wide))
