"""Triton device code: checks and decodes all ranks' packets at once, and adds them up rank by rank.

Each program has a block of the bucket of its own, and adds the ranks in their order. So the sums have the same bits on
every rank, without float atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.triton.accumulate import is_finite, size_of
from dgc_horovod.kernels.triton.encode import (
    BF16,
    CODED,
    EIGHT_BIT,
    FOUR_BIT,
    FP16,
    FP32,
    HEADER_WORDS,
    OCTAVES,
    SUMMED,
    TWO_BIT,
    eight_bits_back,
    four_bits_back,
    two_bits_back,
)
from dgc_horovod.wire.packet import CHECKSUM_FACTOR, CHECKSUM_WORD, COUNT_WORD, FLAGS_WORD, KNOWN_FLAGS

BITS = tl.constexpr(4096)  # bits of the bitmap of a program
FILL_BLOCK = tl.constexpr(2048)  # elements of the bucket that a program zeroes at once
_ADDED = tl.constexpr(128)  # elements that it adds at once: one a thread

_FACTOR = tl.constexpr(CHECKSUM_FACTOR - 2**64)  # as a signed number
_FLAGS_AT, _COUNT_AT, _CHECKSUM_AT = tl.constexpr(FLAGS_WORD), tl.constexpr(COUNT_WORD), tl.constexpr(CHECKSUM_WORD)
_KNOWN_FLAGS = tl.constexpr(KNOWN_FLAGS)


@triton.jit(do_not_specialize=["packet_words", "high_at", "bits", "chunks", "capacity"])
def survey(packets, totals, ones, counts, packet_words, high_at, bits, chunks, capacity):
    """Sum each packet for its checksum, count the positions in each chunk of its bitmap, and read its count.

    Args:
        packets: packets of all ranks, int32 words, one after another.
        totals: sum of each packet, int64, added to.
        ones: number of positions, int32, chunk by chunk, rank by rank.
        counts: number of each rank's elements, int32, as its header says; 0 if it cannot be.
        high_at: index of the word of a packet where the bitmap begins.
        bits: number of bits in the bitmap, whole words.
    """
    rank, part = tl.program_id(1), tl.program_id(0)
    packet = packets + rank.to(tl.int64) * packet_words
    i = part * SUMMED + tl.arange(0, SUMMED)
    word = tl.load(packet + i, mask=(i < packet_words) & (i != _CHECKSUM_AT), other=0).to(tl.int64) & 0xFFFFFFFF
    tl.atomic_add(totals + rank, tl.sum(word * (2 * i + 1).to(tl.int64)), sem="relaxed")
    if part < chunks:
        at = part * (BITS // 32) + tl.arange(0, BITS // 32)
        bitmap = tl.load(packet + high_at + at, mask=at < bits // 32, other=0)
        tl.store(ones + rank * chunks + part, tl.sum(_ones_in(bitmap)))
    if part == 0:
        count = tl.load(packet + _COUNT_AT)
        tl.store(counts + rank, tl.where((count >= 0) & (count <= capacity), count, 0))


@triton.jit
def _ones_in(words):
    """Count the ones in each of int32 `words`."""
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit
def _check_header(packet, header, total, capacity):
    """Return whether magic, version, bucket, step, sizes, codecs, count, flags or checksum are wrong; the flags.

    Args:
        packet: words of the packet.
        header: words of the header that this rank would have sent, int32, with 0 for flags, count and checksum.
        total: sum of the packet, see `survey`.
    """
    i = tl.arange(0, 16)
    differ = tl.load(packet + i, mask=i < HEADER_WORDS, other=0) ^ tl.load(header + i, mask=i < HEADER_WORDS, other=0)
    differ = tl.where(i == _FLAGS_AT, differ & 0xFFFF, tl.where((i == _COUNT_AT) | (i == _CHECKSUM_AT), 0, differ))
    flags = (tl.load(packet + _FLAGS_AT) >> 16) & 0xFFFF
    count = tl.load(packet + _COUNT_AT)
    checksum = ((total * _FACTOR) >> 32).to(tl.int32)
    wrong = (tl.max((differ != 0).to(tl.int32)) != 0) | (count < 0) | (count > capacity)
    wrong = wrong | ((flags & ~_KNOWN_FLAGS) != 0) | (tl.load(packet + _CHECKSUM_AT) != checksum)
    return wrong, flags


@triton.jit
def _bits(area, bit, bits):
    word = tl.load(area + (bit >> 5), mask=bit < bits, other=0)
    return (word >> (bit & 31)) & 1


@triton.jit(do_not_specialize=["packet_words", "high_at", "bits", "chunks", "capacity", "blocks"])
def decode_positions(
    packets, header, totals, ones, counts, positions, starts, flags, refused, packet_words, high_at, bits, chunks,
    capacity, blocks, LOW: tl.constexpr, BLOCK_BITS: tl.constexpr,
):  # fmt: skip
    """Check the headers, decode the positions of all ranks, and find the first element of each block of the bucket.

    Args:
        header: see `_check_header`.
        totals, ones, counts: results of `survey`.
        positions: decoded positions, int32, `capacity` for each rank.
        starts: index of the first element in each block (``2**BLOCK_BITS`` elements) and after the last, int32, for
            each rank. The index of the first block is not written, that after the last not always.
        flags: flags of each rank, int32.
        refused: whether each rank's packet is invalid, int32 zeros, set to 1; here its header and number of positions.
    """
    rank, chunk = tl.program_id(1), tl.program_id(0)
    count = tl.load(counts + rank)
    packet = packets + rank.to(tl.int64) * packet_words
    low_area, area = packet + HEADER_WORDS, packet + high_at
    before = 0
    for first in range(0, chunk, 1024):
        at = first + tl.arange(0, 1024)
        before += tl.sum(tl.load(ones + rank * chunks + at, mask=at < chunk, other=0))
    bit = chunk * BITS + tl.arange(0, BITS)
    is_one = _bits(area, bit, bits)
    i = before + tl.cumsum(is_one) - is_one  # elements before this bit
    zero = bit - i  # zeros before this bit: the upper part of a position
    position = zero << LOW
    listed = (is_one != 0) & (i < capacity)
    if LOW > 0:
        word = low_area + ((i * LOW) >> 5)
        lower = tl.load(word, mask=listed, other=0).to(tl.int64) & 0xFFFFFFFF
        upper = tl.load(word + 1, mask=listed, other=0).to(tl.int64)  # the last word is followed by the bitmap
        low = (lower | (upper << 32)) >> ((i * LOW) & 31).to(tl.int64)
        position = position | (low.to(tl.int32) & ((1 << LOW) - 1))
    tl.store(positions + rank.to(tl.int64) * capacity + i, position, mask=listed)
    # a zero ends an upper part; if that ends a block, the next block begins with element i
    block = (zero + 1) >> (BLOCK_BITS - LOW)
    ends = (((zero + 1) & ((1 << (BLOCK_BITS - LOW)) - 1)) == 0) & (is_one == 0) & (bit < bits) & (block <= blocks)
    tl.store(starts + rank.to(tl.int64) * (blocks + 1) + block, i, mask=ends)
    if chunk == chunks - 1:
        wrong, flag = _check_header(packet, header, tl.load(totals + rank), capacity)
        tl.store(flags + rank, flag)
        if wrong | (before + tl.sum(is_one) != count):
            tl.store(refused + rank, 1)


@triton.jit(do_not_specialize=["packet_words", "values_at", "scales_at", "capacity", "numel"])
def decode_values(
    packets, counts, positions, values, refused, packet_words, values_at, scales_at, capacity, numel,
    CODEC: tl.constexpr,
):  # fmt: skip
    """Decode the values of all ranks, and check positions, values and scales.

    Args:
        values: decoded values, float32, `capacity` for each rank.
        values_at, scales_at: indices of the words of a packet where the values and their scales begin.
    """
    rank = tl.program_id(1)
    count = tl.load(counts + rank)
    first = tl.program_id(0) * CODED
    i = first + tl.arange(0, CODED)
    inside = i < count
    own = positions + rank.to(tl.int64) * capacity
    position = tl.load(own + i, mask=inside, other=0)
    last = tl.load(own + i - 1, mask=inside & (i > 0), other=-1)
    wrong = tl.max((inside & ((position <= last) | (position >= numel))).to(tl.int32))
    packet = packets + rank.to(tl.int64) * packet_words
    area, scales = packet + values_at, packet + scales_at
    magnitudes = scales.to(tl.pointer_type(tl.float32))
    block = first // CODED
    used = first < count
    if CODEC == FP32:
        x = tl.load(area.to(tl.pointer_type(tl.float32)) + i, mask=inside, other=0.0)
    elif CODEC == FP16:
        x = tl.load(area.to(tl.pointer_type(tl.float16)) + i, mask=inside, other=0.0).to(tl.float32)
    elif CODEC == BF16:
        bits = tl.load(area.to(tl.pointer_type(tl.int16)) + i, mask=inside, other=0)
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif CODEC == EIGHT_BIT:
        code = tl.load(area.to(tl.pointer_type(tl.int8)) + i, mask=inside, other=0)
        scale = tl.load(magnitudes + block, mask=used, other=0.0)
        wrong |= _not_a_scale(scale)
        x = eight_bits_back(code, scale)
    elif CODEC == FOUR_BIT:
        code = (tl.load(area + ((i * 4) >> 5), mask=inside, other=0) >> ((i * 4) & 31)) & 15
        least = tl.load(scales + 2 * block, mask=used, other=0)
        most = tl.load(scales + 2 * block + 1, mask=used, other=0)
        ends = _not_a_scale(least.to(tl.float32, bitcast=True)) | _not_a_scale(most.to(tl.float32, bitcast=True))
        wrong |= ends | ((least > most) | (most - least > OCTAVES)).to(tl.int32)
        x = four_bits_back(code, least, most)
    else:
        tl.static_assert(CODEC == TWO_BIT)
        code = (tl.load(area + ((i * 2) >> 5), mask=inside, other=0) >> ((i * 2) & 31)) & 3
        low = tl.load(magnitudes + 2 * block, mask=used, other=0.0)
        high = tl.load(magnitudes + 2 * block + 1, mask=used, other=0.0)
        wrong |= _not_a_scale(low) | _not_a_scale(high)
        x = two_bits_back(code, low, high)
    wrong |= tl.max((inside & ~is_finite(x)).to(tl.int32))
    tl.store(values + rank.to(tl.int64) * capacity + i, x, mask=inside)
    if wrong != 0:
        tl.store(refused + rank, 1)


@triton.jit
def _not_a_scale(scale):
    """Return 1 if `scale` is negative or not finite, else 0."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits < 0) | (size_of(scale) >= 0x7F800000)).to(tl.int32)


@triton.jit
def _bounds(starts, counts, rank, ranks, block, blocks):
    """Return the index of a rank's first element in a block, and the index after its last; both 0 beyond the ranks."""
    there = rank < ranks
    count = tl.load(counts + rank, mask=there, other=0)
    begin = tl.load(starts + block, mask=there & (block > 0), other=0)
    end = tl.load(starts + block + 1, mask=there & (block + 1 < blocks), other=0)
    end = tl.where(block + 1 < blocks, end, count)
    return tl.maximum(begin, 0), tl.minimum(end, count)  # arbitrary if the packet is damaged


@triton.jit
def _listed(positions, values, factor, first, end, outputs, segment_starts, first_segment, last_segment):
    """Load the elements from `first` on; return the address that each is added to, 0 for none, and its value."""
    i = first + tl.arange(0, _ADDED)
    at = tl.load(positions + i, mask=i < end, other=-1)
    value = tl.load(values + i, mask=i < end, other=0.0) * factor
    place = tl.zeros([_ADDED], tl.int64)
    for segment in range(first_segment, last_segment + 1):
        start, stop = tl.load(segment_starts + segment), tl.load(segment_starts + segment + 1)
        output = tl.load(outputs + segment)
        place = tl.where((at >= start) & (at < stop), output + 4 * (at - start).to(tl.int64), place)
    return place, value


@triton.jit
def _add(place, value):
    """Add values at addresses; return which sums are not finite."""
    output, inside = place.to(tl.pointer_type(tl.float32)), place != 0
    total = tl.load(output, mask=inside, other=0.0) + value
    tl.store(output, total, mask=inside)
    return (inside & ~is_finite(total)).to(tl.int32)


@triton.jit(do_not_specialize=["ranks", "capacity", "blocks"])
def aggregate_into(
    outputs, segment_starts, spread, positions, values, starts, counts, scale, flag, ranks, capacity, blocks,
    BLOCK_BITS: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """``update = sum over ranks of values * scale``, in rank order.

    Args:
        outputs: address of each segment's update, int64.
        segment_starts: position of each segment's first element, int32, followed by the end of the bucket.
        spread: first and last segment that have elements in each block (``2**BLOCK_BITS`` elements), int32.
        positions, values: elements of the ranks, int32 and float32, `capacity` for each rank.
        starts, counts: see `decode_positions`.
        scale: factor of the sum, one float32.
        flag: one int32, set to 1 if an element is not finite.
        FRESH: whether the outputs are zeroed first; if not, the sum is added to them.

    Cost: one write of the bucket, 4 bytes an element, and 16 bytes for each element that is added.
    """
    block = tl.program_id(0)
    first_segment, last_segment = tl.load(spread + 2 * block), tl.load(spread + 2 * block + 1)
    factor = tl.load(scale)
    # the first elements of a rank are loaded before those of the rank before are added: few blocks have more of them
    begin, end = _bounds(starts, counts, 0, ranks, block, blocks)
    place, value = _listed(
        positions, values, factor, begin, end, outputs, segment_starts, first_segment, last_segment
    )  # fmt: skip
    if FRESH:
        for offset in range(0, 1 << BLOCK_BITS, FILL_BLOCK):
            at = (block << BLOCK_BITS) + offset + tl.arange(0, FILL_BLOCK)
            for segment in range(first_segment, last_segment + 1):
                start, stop = tl.load(segment_starts + segment), tl.load(segment_starts + segment + 1)
                output = tl.load(outputs + segment).to(tl.pointer_type(tl.float32))
                inside = (at >= start) & (at < stop)
                tl.store(output + (at - start), tl.zeros([FILL_BLOCK], tl.float32), mask=inside)
    wrong = tl.zeros([_ADDED], tl.int32)
    for rank in range(0, ranks):
        own_positions, own_values, first, last = positions, values, begin + _ADDED, end
        now, added = place, value
        positions += capacity
        values += capacity
        starts += blocks + 1
        begin, end = _bounds(starts, counts, rank + 1, ranks, block, blocks)
        place, value = _listed(
            positions, values, factor, begin, end, outputs, segment_starts, first_segment, last_segment
        )  # fmt: skip
        tl.debug_barrier()  # other threads of the program read its earlier writes
        wrong |= _add(now, added)
        for i in range(first, last, _ADDED):
            now, added = _listed(
                own_positions, own_values, factor, i, last, outputs, segment_starts, first_segment, last_segment
            )  # fmt: skip
            wrong |= _add(now, added)
    if tl.max(wrong) != 0:
        tl.atomic_or(flag, 1, sem="relaxed")
