"""Triton device code: selects the k largest candidates of a pass, in the order of their positions.

Two histograms find the k-th magnitude exactly: `accumulate` counts by the upper bits of the height above the candidate
threshold, `refine` by the lower bits within the bin of the k-th. Integers are added, so the order of programs does not
matter. If the candidates are not usable (too few, too many, a threshold that is far off, or a number that is not
finite), READY stays 0, later kernels do nothing, and the host selects from the bucket.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.triton.accumulate import BINS, FINE_BITS, FLAGS, LEAST, NOTED, READY, TIES, size_of

LIST_BLOCK = tl.constexpr(1024)  # candidates of a program
GROUP = tl.constexpr(128)  # blocks of a program
_AT_ONCE = tl.constexpr(16)  # candidates of each block that a program reads at once
FINE_BINS = tl.constexpr(1 << 13)


@triton.jit
def _bin_of(histogram, k, SIZE: tl.constexpr):
    """Return the highest bin so that it and those above have at least k, or -1, and the count above it."""
    bins = tl.arange(0, SIZE)
    counts = tl.load(histogram + bins)
    from_here = tl.sum(counts) - tl.cumsum(counts) + counts
    found = tl.sum((from_here >= k).to(tl.int32)) - 1
    return found, tl.sum(tl.where(bins > found, counts, 0))


@triton.jit(do_not_specialize=["k", "max_candidates"])
def refine(values, threshold, report, histogram, fine, k, max_candidates):
    """Count the candidates in the bin of the k-th largest by their lower bits.

    Args:
        values: values of the candidates, float32.
        threshold: smallest magnitude of a candidate, one float32.
        report: report of the pass; NOTED is read.
        histogram, fine: counts by upper and by lower bits, BINS and FINE_BINS of int32; `fine` is added to.
    """
    num_candidates = tl.load(report + NOTED)
    at = tl.program_id(0) * LIST_BLOCK + tl.arange(0, LIST_BLOCK)
    if (num_candidates >= k) & (num_candidates <= max_candidates) & (tl.program_id(0) * LIST_BLOCK < num_candidates):
        found, _ = _bin_of(histogram, k, BINS)
        height = size_of(tl.load(values + at, mask=at < num_candidates, other=0.0)) - size_of(tl.load(threshold))
        inside = (at < num_candidates) & (tl.minimum(height >> FINE_BITS, BINS - 1) == found)
        tl.atomic_add(fine + (height & (FINE_BINS - 1)), 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["k", "max_candidates", "blocks"])
def count(
    values,
    threshold,
    report,
    histogram,
    fine,
    bases,
    counts,
    larger,
    equal,
    larger_sums,
    equal_sums,
    k,
    max_candidates,
    blocks,
):
    """Count the candidates of each block larger than and equal to the k-th largest, and sum the counts by group.

    Args:
        report: report of the step; READY, LEAST (the k-th magnitude as `size_of`) and TIES (equal ones sent) are set.
        bases, counts: index in the list of each block's first candidate, and their number, int32.
        larger, equal: number of larger and of equal candidates, int32, one a block.
        larger_sums, equal_sums: sums of `larger` and of `equal`, int32, one a group.
    """
    group = tl.program_id(0)
    num_candidates = tl.load(report + NOTED)
    found, above = _bin_of(histogram, k, BINS)
    fine_found, fine_above = _bin_of(fine, k - above, FINE_BINS)
    ready = (
        (num_candidates >= k) & (num_candidates <= max_candidates) & (found < BINS - 1) & (tl.load(report + FLAGS) == 0)
    )
    least = size_of(tl.load(threshold)) + (found << FINE_BITS) + fine_found
    if group == 0:
        tl.store(report + READY, ready.to(tl.int32))
        tl.store(report + LEAST, least)
        tl.store(report + TIES, k - above - fine_above)
    if ready:
        block = group * GROUP + tl.arange(0, GROUP)
        inside = block < blocks
        base = tl.load(bases + block, mask=inside, other=0)
        most = tl.load(counts + block, mask=inside, other=0)
        more = tl.zeros([GROUP], tl.int32)
        same = tl.zeros([GROUP], tl.int32)
        for first in range(0, tl.max(most), _AT_ONCE):
            rank = first + tl.arange(0, _AT_ONCE)[None, :]
            listed = rank < most[:, None]
            size = size_of(tl.load(values + base[:, None] + rank, mask=listed, other=0.0))
            more += tl.sum((listed & (size > least)).to(tl.int32), axis=1)
            same += tl.sum((listed & (size == least)).to(tl.int32), axis=1)
        tl.store(larger + block, more, mask=inside)
        tl.store(equal + block, same, mask=inside)
        tl.store(larger_sums + group, tl.sum(more))
        tl.store(equal_sums + group, tl.sum(same))


@triton.jit
def _before(sums, group):
    """Sum over the groups before this one."""
    total = 0
    for first in range(0, group, 1024):
        at = first + tl.arange(0, 1024)
        total += tl.sum(tl.load(sums + at, mask=at < group, other=0))
    return total


@triton.jit(do_not_specialize=["blocks"])
def gather(
    positions, values, report, bases, counts, larger, equal, larger_sums, equal_sums, chosen_positions, chosen_values,
    blocks,
):  # fmt: skip
    """Write the k largest candidates by ascending position; of equal ones the first are taken.

    Args:
        positions, values: candidates, int32 and float32.
        chosen_positions, chosen_values: k largest candidates, int32 and float32, written here.
    """
    if tl.load(report + READY) != 0:
        group = tl.program_id(0)
        block = group * GROUP + tl.arange(0, GROUP)
        inside = block < blocks
        least, ties = tl.load(report + LEAST), tl.load(report + TIES)
        base = tl.load(bases + block, mask=inside, other=0)
        most = tl.load(counts + block, mask=inside, other=0)
        more = tl.load(larger + block, mask=inside, other=0)
        same = tl.load(equal + block, mask=inside, other=0)
        more = _before(larger_sums, group) + tl.cumsum(more) - more  # counts before the block
        same = _before(equal_sums, group) + tl.cumsum(same) - same
        for first in range(0, tl.max(most), _AT_ONCE):
            rank = first + tl.arange(0, _AT_ONCE)[None, :]
            listed = rank < most[:, None]
            value = tl.load(values + base[:, None] + rank, mask=listed, other=0.0)
            is_larger = (listed & (size_of(value) > least)).to(tl.int32)
            is_equal = (listed & (size_of(value) == least)).to(tl.int32)
            before = same[:, None] + tl.cumsum(is_equal, axis=1) - is_equal
            place = more[:, None] + tl.cumsum(is_larger, axis=1) - is_larger + tl.minimum(before, ties)
            taken = (is_larger != 0) | ((is_equal != 0) & (before < ties))
            tl.store(chosen_values + place, value, mask=taken)
            tl.store(chosen_positions + place, tl.load(positions + base[:, None] + rank, mask=taken), mask=taken)
            more += tl.sum(is_larger, axis=1)
            same += tl.sum(is_equal, axis=1)
