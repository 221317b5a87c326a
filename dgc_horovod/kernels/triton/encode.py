"""Triton device code: selects the k largest candidates of a pass, and encodes them into a packet.

Two histograms find the k-th magnitude exactly: `accumulate` counts by the upper bits of the height above the candidate
threshold, `refine` by the lower bits within the bin of the k-th. Integers are added, so the order of programs does not
matter. If the candidates are not usable (too few, too many, a threshold that is far off, or a number that is not
finite), READY stays 0, later kernels do nothing, and the host selects from the bucket.

The packet is encoded byte for byte as `packet.NumpyCoder` does, and u and v are updated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.triton.accumulate import BINS, FINE_BITS, FLAGS, LEAST, NOTED, READY, TIES, ZEROS, size_of

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


CODED = tl.constexpr(256)  # elements of a program: one block of common scales
SUMMED = tl.constexpr(1024)  # elements, and words, of a program of `update_residual`
HEADER_WORDS = tl.constexpr(9)
CHECKSUM = tl.constexpr(6)  # index in the report of the sum, 64 bits

FP32, FP16, BF16, EIGHT_BIT, FOUR_BIT, TWO_BIT = (tl.constexpr(code) for code in range(1, 7))  # as in packets
_LARGEST_FP16, _LARGEST_FP32 = tl.constexpr(65504.0), tl.constexpr(3.4028234663852886e38)
_LARGEST_BF16 = tl.constexpr(0x7F7F0000)
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it has no digits for a fraction
OCTAVES = tl.constexpr(7 << 23)  # largest distance of the least and the largest magnitude of the codec 4bit


@triton.jit
def _nearest(x):
    """Round small float32 `x` to integers, ties to even."""
    return (x + _ROUNDER) - _ROUNDER


@triton.jit
def bf16_of(x):
    """Return `x` as the 16 bits of a bfloat16, rounded to nearest even, saturating."""
    size = tl.minimum(size_of(x), _LARGEST_BF16)
    rounded = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    return rounded | ((x.to(tl.int32, bitcast=True) >> 16) & 0x8000)


@triton.jit
def eight_bits_back(code, scale):
    """Return the value of a code of -127 to 127."""
    return tl.minimum(tl.maximum(code.to(tl.float32) * scale, -_LARGEST_FP32), _LARGEST_FP32)


@triton.jit
def four_bits_back(code, least, most):
    """Return the value of four bits: sign, and step between `least` and `most`, the bits of float32 numbers."""
    wide = (most - least).to(tl.int64) * (code & 7).to(tl.int64)
    size = least + ((wide + 3) // 7).to(tl.int32)
    return (size | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def two_bits_back(code, low, high):
    """Return the value of two bits: sign, and the choice of two magnitudes."""
    size = tl.where((code & 1) != 0, high, low)
    return tl.where((code & 2) != 0, -size, size)


@triton.jit
def _in_order(values, first, count, least):
    """Sum, one after another in float64, the magnitudes of at least `least`, and the others."""
    high = tl.zeros([], tl.float64)
    low = tl.zeros([], tl.float64)
    for i in range(0, count):
        size = tl.abs(tl.load(values + first + i)).to(tl.float64)
        if size >= least:
            high += size
        else:
            low += size
    return high, low


@triton.jit
def _put_bits(area, i, code, BITS: tl.constexpr, inside):
    """Write `code` at bit ``BITS*i`` of `area`; BITS divides 32, and these bits must be zero."""
    tl.atomic_or(area + ((i * BITS) >> 5), code << ((i * BITS) & 31), mask=inside, sem="relaxed")


@triton.jit
def _encode_values(values, x, i, inside, first, area, scales, CODEC: tl.constexpr):
    """Write a block's values; return the decoded values."""
    magnitudes = scales.to(tl.pointer_type(tl.float32))
    block = first // CODED
    if CODEC == FP32:
        tl.store(area.to(tl.pointer_type(tl.float32)) + i, x, mask=inside)
        back = x
    elif CODEC == FP16:
        narrow = tl.minimum(tl.maximum(x, -_LARGEST_FP16), _LARGEST_FP16).to(tl.float16)
        tl.store(area.to(tl.pointer_type(tl.float16)) + i, narrow, mask=inside)
        back = narrow.to(tl.float32)
    elif CODEC == BF16:
        bits = bf16_of(x)
        tl.store(area.to(tl.pointer_type(tl.int16)) + i, bits.to(tl.int16), mask=inside)
        back = (bits << 16).to(tl.float32, bitcast=True)
    elif CODEC == EIGHT_BIT:
        scale = tl.math.div_rn(tl.max(tl.abs(x)), 127.0)
        steps = tl.where(scale > 0, tl.math.div_rn(x, tl.where(scale > 0, scale, 1.0)), 0.0)
        code = tl.minimum(tl.maximum(_nearest(steps), -127.0), 127.0).to(tl.int32)
        tl.store(area.to(tl.pointer_type(tl.int8)) + i, code.to(tl.int8), mask=inside)
        tl.store(magnitudes + block, scale)
        back = eight_bits_back(code, scale)
    elif CODEC == FOUR_BIT:
        size = size_of(x)
        most = tl.max(tl.where(inside, size, 0))
        least = tl.maximum(tl.min(tl.where(inside, size, 0x7FFFFFFF)), most - OCTAVES)
        span = tl.maximum(most - least, 1)
        step = (7 * (size - least).to(tl.int64) + (most - least) // 2) // span
        code = tl.where(size > least, step.to(tl.int32), 0) | (((x.to(tl.int32, bitcast=True) >> 31) & 1) << 3)
        _put_bits(area, i, code, 4, inside)
        tl.store(scales + 2 * block, least)
        tl.store(scales + 2 * block + 1, most)
        back = four_bits_back(code, least, most)
    else:
        tl.static_assert(CODEC == TWO_BIT)
        count = tl.sum(inside.to(tl.int32))
        total, _ = _in_order(values, first, count, 0.0)
        middle = total / count.to(tl.float64)
        is_high = inside & (tl.abs(x).to(tl.float64) >= middle)
        highs = tl.sum(is_high.to(tl.int32))
        high, low = _in_order(values, first, count, middle)
        high = (high / tl.maximum(highs, 1).to(tl.float64)).to(tl.float32)
        low = (low / tl.maximum(count - highs, 1).to(tl.float64)).to(tl.float32)
        code = is_high.to(tl.int32) | (((x.to(tl.int32, bitcast=True) >> 31) & 1) << 1)
        _put_bits(area, i, code, 2, inside)
        tl.store(magnitudes + 2 * block, low)
        tl.store(magnitudes + 2 * block + 1, high)
        back = two_bits_back(code, low, high)
    return back


@triton.jit(do_not_specialize=["capacity", "values_at", "scales_at"])
def encode(
    positions, values, decoded, report, packet, header, capacity, values_at, scales_at, LOW: tl.constexpr,
    CODEC: tl.constexpr,
):  # fmt: skip
    """Write the header and the elements into a packet of zeros.

    Args:
        positions, values: selected elements, int32 and float32, `capacity` of them, ascending.
        decoded: decoded values, float32, written here.
        report: report of the step; ZEROS counts values that are rounded to zero, which must not be sent.
        packet: words of the packet, int32.
        header: first words of the packet, int32, without the checksum.
        values_at, scales_at: indices of the words of the packet where the values and their scales begin.
        LOW: number of low bits of Elias-Fano.
        CODEC: code of the value codec, 1 to 6.
    """
    if tl.load(report + READY) != 0:
        first = tl.program_id(0) * CODED
        i = first + tl.arange(0, CODED)
        inside = i < capacity
        if first == 0:
            word = tl.arange(0, 16)
            tl.store(packet + word, tl.load(header + word, mask=word < HEADER_WORDS), mask=word < HEADER_WORDS)
        position = tl.load(positions + i, mask=inside, other=0)
        low_area = packet + HEADER_WORDS
        high_area = low_area + (capacity * LOW + 31) // 32
        if LOW > 0:
            low = (position & ((1 << LOW) - 1)).to(tl.int64) << ((i * LOW) & 31).to(tl.int64)
            word = low_area + ((i * LOW) >> 5)
            upper = (low >> 32).to(tl.int32)
            tl.atomic_or(word, low.to(tl.int32), mask=inside, sem="relaxed")
            tl.atomic_or(word + 1, upper, mask=inside & (upper != 0), sem="relaxed")
        bit = (position >> LOW) + i
        tl.atomic_or(high_area + (bit >> 5), tl.full([CODED], 1, tl.int32) << (bit & 31), mask=inside, sem="relaxed")
        x = tl.load(values + i, mask=inside, other=0.0)
        back = _encode_values(values, x, i, inside, first, packet + values_at, packet + scales_at, CODEC)
        tl.store(decoded + i, back, mask=inside)
        zeros = tl.sum((inside & (back == 0)).to(tl.int32))
        if zeros != 0:
            tl.atomic_add(report + ZEROS, zeros, sem="relaxed")


@triton.jit(do_not_specialize=["capacity", "words"])
def update_residual(positions, values, decoded, masked, v, u, report, packet, capacity, words, MASKS: tl.constexpr):
    """``v = values - decoded`` and, with MASKS, ``u = 0`` at the positions; sum the packet for its checksum.

    Args:
        masked: values of u at the positions, float32, written here.
        report: report of the step; the sum is added to the 64 bits at CHECKSUM.
        packet, words: packet with a checksum of zero, and the number of its words.
    """
    if (tl.load(report + READY) != 0) & (tl.load(report + ZEROS) == 0):
        i = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
        inside = i < capacity
        at = tl.load(positions + i, mask=inside, other=0)
        left = tl.load(values + i, mask=inside, other=0.0) - tl.load(decoded + i, mask=inside, other=0.0)
        tl.store(v + at, left, mask=inside)
        if MASKS:
            tl.store(masked + i, tl.load(u + at, mask=inside, other=0.0), mask=inside)
            tl.debug_barrier()  # another thread may zero an element that is still to be read
            tl.store(u + at, tl.zeros([SUMMED], tl.float32), mask=inside)
        word = tl.load(packet + i, mask=i < words, other=0).to(tl.int64) & 0xFFFFFFFF
        total = tl.sum(word * (2 * i + 1).to(tl.int64))
        tl.atomic_add((report + CHECKSUM).to(tl.pointer_type(tl.int64)), total, sem="relaxed")
