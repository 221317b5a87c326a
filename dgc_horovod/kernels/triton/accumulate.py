"""Triton device code: the pass over a bucket, which updates u and v and collects the candidates; sums; Adam's part."""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.contract import CHUNK, LANES
from dgc_horovod.kernels.reference import SIGN_STRIDE

BLOCK = tl.constexpr(512)  # elements of a program, for all kernels that read the bucket
# Few threads, so that many programs share a multiprocessor while each waits for memory and for its place in the list
WARPS = 2  # of a program of `accumulate`
BINS, FINE_BITS = tl.constexpr(4096), tl.constexpr(13)  # four octaves above the candidate threshold; 1,024 bins each

# Indices in `numbers`
SCALE, MOMENTUM, BOUND = (tl.constexpr(i) for i in range(3))
# Indices in `report`
FLAGS, NOTED, READY, ZEROS, LEAST, TIES = (tl.constexpr(i) for i in range(6))
BAD_GRADIENT, BAD_RESIDUAL = tl.constexpr(1), tl.constexpr(2)

RESIDUAL_FEED, MOMENTUM_FEED, NESTEROV_FEED, SHARED_FEED = (tl.constexpr(i) for i in range(4))
# Indices in `factors` of a segment with a shared second moment: two addresses, number of columns, offset
ROWS, COLUMNS, WIDTH, OFFSET, FACTORS = (tl.constexpr(i) for i in range(5))

_SIZE, _INFINITE = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000)


@triton.jit
def touch(x):
    """Write one number, to test whether kernels run."""
    tl.store(x, 1)


@triton.jit
def size_of(x):
    """Return the magnitude of float32 `x` as integers in the same order; from `_INFINITE` on it is not finite."""
    return x.to(tl.int32, bitcast=True) & _SIZE


@triton.jit
def is_finite(x):
    """Return whether each of float32 `x` is neither NaN nor infinite."""
    return size_of(x) < _INFINITE


@triton.jit
def factors_of(factors, segment):
    """Return pointers to the row and column factors of a segment's tensor, its number of columns, and its offset."""
    at = factors + segment * FACTORS
    rows = tl.load(at + ROWS).to(tl.pointer_type(tl.float32))
    columns = tl.load(at + COLUMNS).to(tl.pointer_type(tl.float32))
    return rows, columns, tl.load(at + WIDTH), tl.load(at + OFFSET)


@triton.jit(do_not_specialize=["max_candidates"])
def accumulate(
    v, u, gradients, factors, starts, spread, threshold, numbers, report, positions, values, bases, counts,
    histogram, numel, max_candidates, FEED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """``v += accumulate(g)``; list the elements that reach the threshold.

    Args:
        v, u: state of the bucket, flat float32.
        gradients: address of each segment's gradient, int64.
        factors: of a shared second moment, int64, FACTORS a segment.
        starts: position of each segment's first element, int32, followed by the end of the bucket.
        spread: first and last segment that have elements in each block, int32, two a block.
        threshold: smallest magnitude that makes a candidate, one float32; infinity: none.
        numbers: scale and hyper-parameters of this step, float32, at the indices above.
        report: report of the step, int32; FLAGS and NOTED are added to.
        positions, values: candidates, int32 and float32, at most `max_candidates`; others are only counted.
        ALIGNED: whether segments begin at multiples of four elements, in the bucket and in memory.
        bases, counts: index in the list of each block's first candidate, and their number, int32.
        histogram: number of candidates by height above the threshold, BINS of int32; the last bin is open.

    Cost: 20 bytes an element with momentum, 12 without momentum or with a shared second moment.
    """
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    if ALIGNED:
        numel = (numel // 4) * 4  # unchanged; it tells the compiler
    inside = at < numel
    # loaded before the gradient, whose address takes two loads
    scale, momentum = tl.load(numbers + SCALE), tl.load(numbers + MOMENTUM)
    least = size_of(tl.load(threshold))
    kept = tl.load(v + at, mask=inside, other=0.0)
    if FEED == MOMENTUM_FEED or FEED == NESTEROV_FEED:
        moved = tl.load(u + at, mask=inside, other=0.0)
    g = tl.zeros([BLOCK], tl.float32)
    row, column = g, g
    for segment in range(tl.load(spread + 2 * block), tl.load(spread + 2 * block + 1) + 1):
        start, end = tl.load(starts + segment), tl.load(starts + segment + 1)
        gradient = tl.load(gradients + segment).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            start, end, gradient = tl.multiple_of(start, 4), tl.multiple_of(end, 4), tl.multiple_of(gradient, 16)
        here = (at >= start) & (at < end)
        g = tl.where(here, tl.load(gradient + (at - start), mask=here, other=0.0), g)
        if FEED == SHARED_FEED:
            rows, columns, width, offset = factors_of(factors, segment)
            place = (at - start).to(tl.int64) + offset
            row = tl.where(here, tl.load(rows + place // width, mask=here, other=0.0), row)
            column = tl.where(here, tl.load(columns + place % width, mask=here, other=0.0), column)
    sound = is_finite(g)
    g = tl.where(sound, g, 0.0) * scale

    if FEED == RESIDUAL_FEED:
        kept = kept + g
    elif FEED == SHARED_FEED:
        bound = tl.load(numbers + BOUND)
        kept = kept + tl.minimum(tl.maximum(g * row * column, -bound), bound)
    else:
        moved = moved * momentum + g
        tl.store(u + at, moved, mask=inside)
        if FEED == NESTEROV_FEED:
            kept = kept + g + moved * momentum
        else:
            kept = kept + moved
    tl.store(v + at, kept, mask=inside)

    left = inside & ~is_finite(kept)
    size = size_of(kept)
    num_candidates = (inside & (size >= least) & (size != 0)).to(tl.int32)
    # one sum for all counts: each sum costs the program a wait
    seen = tl.sum(num_candidates + ((~sound | left).to(tl.int32) << 16))
    count = seen & 0xFFFF
    if seen != count:
        flags = tl.max((~sound).to(tl.int32)) * BAD_GRADIENT | tl.max(left.to(tl.int32)) * BAD_RESIDUAL
        tl.atomic_or(report + FLAGS, flags, sem="relaxed")
    base = 0
    if count > 0:
        base = tl.atomic_add(report + NOTED, count, sem="relaxed")
        place = base + tl.cumsum(num_candidates) - num_candidates
        fits = (num_candidates != 0) & (place < max_candidates)
        tl.store(positions + place, at, mask=fits)
        tl.store(values + place, kept, mask=fits)
        height = tl.minimum((size - least) >> FINE_BITS, BINS - 1)
        tl.atomic_add(histogram + height, 1, mask=num_candidates != 0, sem="relaxed")
    tl.store(bases + block, base)
    tl.store(counts + block, count)


_CHUNK, _LANES = tl.constexpr(CHUNK), tl.constexpr(LANES)


@triton.jit
def _tree(x):
    """Sum a chunk: neighbouring rows pairwise until one is left, then the upper half of the lanes to the lower."""
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
    """Compute sum and sum of squares of each chunk, in float64; elements that are not finite count as zero.

    Args:
        vectors: address of each vector, int64.
        table: for each program: index of its vector, its first element, number of elements of the vector, int32.
        sums: sum and sum of squares of each program, float64.
    """
    number = tl.program_id(0)
    vector = tl.load(vectors + tl.load(table + 3 * number)).to(tl.pointer_type(tl.float32))
    at = tl.load(table + 3 * number + 1) + tl.arange(0, _CHUNK)
    x = tl.load(vector + at, mask=at < tl.load(table + 3 * number + 2), other=0.0)
    wide = tl.where(is_finite(x), x, 0.0).to(tl.float64)
    tl.store(sums + 2 * number, _tree(wide))
    tl.store(sums + 2 * number + 1, _tree(wide * wide))


MATRIX_ROWS, _MATRIX_COLUMNS = tl.constexpr(16), tl.constexpr(256)  # of the matrix, that a program has at once
_STRIDE = tl.constexpr(SIGN_STRIDE)


@triton.jit(do_not_specialize=["first_row", "before", "numel", "rows", "columns"])
def measure_rows(x, signs, found, parts, first_row, before, numel, rows, columns):
    """Measure a gradient for Adam's shared second moment, in one read of it.

    Sums squares and products with signs over each row, and squares over the columns of each block of rows.

    Args:
        x: elements of the matrix, float32, row by row.
        signs: see `Kernels.measure`.
        found: squares of the rows; behind them room for those of the columns, then products of the rows; float32.
        parts: squares of the columns of each block of rows, float32.
        first_row: index of the first row in the tensor.
        before: number of elements of the first row that are not in x.
    """
    block = tl.program_id(0)
    row = block * MATRIX_ROWS + tl.arange(0, MATRIX_ROWS)
    first_sign = (first_row + row).to(tl.int64) * _STRIDE % columns
    squares, products = tl.zeros([MATRIX_ROWS], tl.float32), tl.zeros([MATRIX_ROWS], tl.float32)
    for start in range(0, columns, _MATRIX_COLUMNS):
        column = start + tl.arange(0, _MATRIX_COLUMNS)
        at = row[:, None].to(tl.int64) * columns + column[None, :] - before
        inside = (column[None, :] < columns) & (at >= 0) & (at < numel)
        value = tl.load(x + at, mask=inside, other=0.0)
        sign = tl.load(signs + first_sign[:, None] + column[None, :], mask=inside, other=0.0)
        square = value * value
        squares += tl.sum(square, axis=1)
        products += tl.sum(value * sign, axis=1)
        tl.store(parts + block.to(tl.int64) * columns + column, tl.sum(square, axis=0), mask=column < columns)
    tl.store(found + row, squares, mask=row < rows)
    tl.store(found + rows + columns + row, products, mask=row < rows)
