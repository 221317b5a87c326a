"""Triton device code: encodes a packet, byte for byte as `packet.NumpyCoder` does, and updates u and v."""

from __future__ import annotations

import triton
import triton.language as tl

from dgc_horovod.kernels.triton.accumulate import READY, ZEROS, size_of

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
