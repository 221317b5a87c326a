"""Triton device code: measures a gradient for Adam's shared second moment, in one read of it."""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.composed import SIGN_STRIDE

ROWS, COLUMNS = tl.constexpr(16), tl.constexpr(256)  # of the matrix, that a program has at once
_STRIDE = tl.constexpr(SIGN_STRIDE)


@triton.jit(do_not_specialize=["first_row", "before", "numel", "rows", "columns"])
def measure_rows(x, signs, found, parts, first_row, before, numel, rows, columns):
    """Sum squares and products with signs over each row, and squares over the columns of each block of rows.

    Args:
        x: elements of the matrix, float32, row by row.
        signs: see `Kernels.measure`.
        found: squares of the rows; behind them room for those of the columns, then products of the rows; float32.
        parts: squares of the columns of each block of rows, float32.
        first_row: index of the first row in the tensor.
        before: number of elements of the first row that are not in x.
    """
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    first_sign = (first_row + row).to(tl.int64) * _STRIDE % columns
    squares, products = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
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
