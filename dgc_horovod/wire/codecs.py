"""Codecs of a packet's positions and values: the NumPy reference, which other coders match byte for byte."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dgc_horovod.errors import CorruptPacket


class IndexCodec(Protocol):
    """Encodes positions in [0, numel), at most `capacity` of them. All sizes are whole 32-bit words."""

    code: int
    name: str

    def nbytes(self, numel: int, capacity: int) -> int:
        """Encoded size in bytes, independent of the positions."""

    def encode(self, positions: np.ndarray, numel: int, capacity: int, out: np.ndarray) -> None:
        """Write ascending unique positions into `out`, which holds `nbytes` zero bytes."""

    def decode(self, data: np.ndarray, count: int, numel: int, capacity: int) -> np.ndarray:
        """Return `count` int32 positions; raise CorruptPacket unless they ascend within [0, numel)."""


def word_bytes(bits: int) -> int:
    """Number of bytes of the 32-bit words that hold `bits` bits."""
    return -(-bits // 32) * 4


def _checked(positions: np.ndarray, numel: int) -> np.ndarray:
    if positions.size and (positions[0] < 0 or positions[-1] >= numel or (np.diff(positions) <= 0).any()):
        raise CorruptPacket(f"positions are not ascending within [0, {numel})")
    return positions.astype(np.int32)


class EliasFanoIndices:
    """Elias-Fano: the low bits of each position as they are, the high parts as a unary bitmap.

    Position i sets bit ``(position >> low) + i`` of the bitmap. The bitmap has ``capacity + numel / 2**low`` bits; low
    bits and bitmap together take ``low + 1 + numel / (capacity * 2**low)`` bits a position.
    """

    code, name = 2, "elias-fano"

    @staticmethod
    def low_bits(numel: int, capacity: int) -> int:
        """Number of low bits that minimizes the encoded size."""
        return min(range(32), key=lambda low: capacity * low + ((numel - 1) >> low))

    def nbytes(self, numel: int, capacity: int) -> int:
        low = self.low_bits(numel, capacity)
        return word_bytes(capacity * low) + word_bytes(capacity + ((numel - 1) >> low))

    def encode(self, positions: np.ndarray, numel: int, capacity: int, out: np.ndarray) -> None:
        low, count = self.low_bits(numel, capacity), positions.size
        wide = positions.astype(np.int64)
        low_parts = (wide[:, None] >> np.arange(low)) & 1
        packed = np.packbits(low_parts.astype(np.uint8), bitorder="little")
        out[: packed.size] = packed
        unary = np.zeros(8 * (out.size - word_bytes(capacity * low)), np.uint8)
        unary[(wide >> low) + np.arange(count)] = 1
        out[word_bytes(capacity * low) :] = np.packbits(unary, bitorder="little")

    def decode(self, data: np.ndarray, count: int, numel: int, capacity: int) -> np.ndarray:
        low = self.low_bits(numel, capacity)
        split = word_bytes(capacity * low)
        ones = np.flatnonzero(np.unpackbits(data[split:], bitorder="little"))
        if ones.size != count:
            raise CorruptPacket(f"the bitmap of positions has {ones.size} entries, the header says {count}")
        bits = np.unpackbits(data[:split], bitorder="little")[: count * low].reshape(count, low)
        low_parts = bits.astype(np.int64) @ (1 << np.arange(low, dtype=np.int64))
        return _checked(((ones - np.arange(count)) << low) | low_parts, numel)


class EveryIndex:
    """Writes no positions: a packet has all elements or none."""

    code, name = 3, "every"

    def nbytes(self, numel: int, capacity: int) -> int:
        return 0

    def encode(self, positions: np.ndarray, numel: int, capacity: int, out: np.ndarray) -> None:
        assert positions.size in (0, numel)

    def decode(self, data: np.ndarray, count: int, numel: int, capacity: int) -> np.ndarray:
        if count not in (0, numel):
            raise CorruptPacket(f"the packet has {count} elements; it must have all {numel} or none")
        return np.arange(count, dtype=np.int32)


INDEX_CODECS: dict[str, IndexCodec] = {c.name: c for c in (EliasFanoIndices(), EveryIndex())}


BLOCK = 256  # values with common scales
_SIZE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000


class ValueCodec(Protocol):
    """Encodes float32 values, at most `capacity` of them. All sizes are whole 32-bit words."""

    code: int
    name: str

    def nbytes(self, capacity: int) -> int:
        """Encoded size in bytes, independent of the values."""

    def scales_at(self, capacity: int) -> int:
        """Byte offset of the blocks' scales, which follow the values' codes."""

    def encode(self, values: np.ndarray, capacity: int, out: np.ndarray) -> None:
        """Write finite values into `out`, which holds `nbytes` zero bytes."""

    def decode(self, data: np.ndarray, count: int, capacity: int) -> np.ndarray:
        """Return `count` float32 values; raise CorruptPacket if no encoder writes such data."""


def _finite(values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).all():
        raise CorruptPacket("values that are not finite")
    return values


class FloatValues:
    """IEEE fp32, or fp16 that saturates at +-65504."""

    def __init__(self, code: int, name: str, dtype: str) -> None:
        self.code, self.name, self.dtype = code, name, np.dtype(dtype)
        self._largest = float(np.finfo(self.dtype).max)

    def nbytes(self, capacity: int) -> int:
        return word_bytes(8 * self.dtype.itemsize * capacity)

    def scales_at(self, capacity: int) -> int:
        return self.nbytes(capacity)  # there are none

    def encode(self, values: np.ndarray, capacity: int, out: np.ndarray) -> None:
        out[: self.dtype.itemsize * values.size].view(self.dtype)[:] = np.clip(values, -self._largest, self._largest)

    def decode(self, data: np.ndarray, count: int, capacity: int) -> np.ndarray:
        return _finite(data[: self.dtype.itemsize * count].view(self.dtype).astype(np.float32))


class BFloat16Values:
    """bfloat16, rounded to nearest even; it saturates at its largest finite number."""

    code, name = 3, "bf16"
    _LARGEST = 0x7F7F0000  # as float32 bits

    def nbytes(self, capacity: int) -> int:
        return word_bytes(16 * capacity)

    def scales_at(self, capacity: int) -> int:
        return self.nbytes(capacity)  # there are none

    def encode(self, values: np.ndarray, capacity: int, out: np.ndarray) -> None:
        bits = _bits(values)
        size = np.minimum(bits & _SIZE, self._LARGEST)
        nearest = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
        out[: 2 * values.size].view("<u2")[:] = nearest | ((bits >> 16) & 0x8000)

    def decode(self, data: np.ndarray, count: int, capacity: int) -> np.ndarray:
        return _finite((data[: 2 * count].view("<u2").astype(np.uint32) << 16).view(np.float32))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


class BlockValues:
    """A code of a few bits for each value, then float32 scales for every block of 256 values.

    A subclass turns rows of one block each into codes and scales, and back. A short row is filled with zeros; `inside`
    is False there.
    """

    code: int
    name: str
    bits: int
    scales: int

    def nbytes(self, capacity: int) -> int:
        return self.scales_at(capacity) + 4 * self.scales * -(-capacity // BLOCK)

    def scales_at(self, capacity: int) -> int:
        return word_bytes(self.bits * capacity)

    def encode(self, values: np.ndarray, capacity: int, out: np.ndarray) -> None:
        if not values.size:
            return
        rows, inside = _rows(values)
        codes, scales = self.encode_rows(rows, inside)
        code_bits = (codes.reshape(-1)[: values.size, None] >> np.arange(self.bits)) & 1
        packed = np.packbits(code_bits.astype(np.uint8), bitorder="little")
        out[: packed.size] = packed
        at = self.scales_at(capacity)
        out[at : at + 4 * scales.size].view("<f4")[:] = scales.reshape(-1)

    def decode(self, data: np.ndarray, count: int, capacity: int) -> np.ndarray:
        if not count:
            return np.empty(0, np.float32)
        bits = np.unpackbits(data[: self.scales_at(capacity)], bitorder="little")[: self.bits * count]
        codes = bits.reshape(count, self.bits).astype(np.int64) @ (1 << np.arange(self.bits))
        rows, _ = _rows(codes)
        at = self.scales_at(capacity)
        scales = data[at : at + 4 * self.scales * len(rows)].view("<f4").reshape(len(rows), self.scales)
        if (scales.view(np.uint32) >= _INFINITY).any():
            raise CorruptPacket("scales that are negative or not finite")
        with np.errstate(over="ignore"):
            return self.decode_rows(rows, scales).reshape(-1)[:count].astype(np.float32)

    def encode_rows(self, x: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes and scales of (blocks, 256) values."""
        raise NotImplementedError

    def decode_rows(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return the values of (blocks, 256) codes."""
        raise NotImplementedError


def _rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `x` as rows of one block each, and a mask of the entries that come from x."""
    blocks = -(-x.size // BLOCK)
    rows = np.zeros(blocks * BLOCK, x.dtype)
    rows[: x.size] = x
    return rows.reshape(blocks, BLOCK), (np.arange(blocks * BLOCK) < x.size).reshape(blocks, BLOCK)


class EightBitValues(BlockValues):
    """8 bits: an integer from -127 to 127, times a 127th of the block's largest magnitude. 8.125 bits a value."""

    code, name, bits, scales = 4, "8bit", 8, 1

    def encode_rows(self, x: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        steps = np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)
        return np.rint(steps).clip(-127, 127).astype(np.int8).view(np.uint8), scale

    def decode_rows(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        largest = np.finfo(np.float32).max
        return (codes.astype(np.uint8).view(np.int8).astype(np.float32) * scales).clip(-largest, largest)


class FourBitValues(BlockValues):
    """4 bits: sign and one of eight magnitudes from the block's least to its largest. 4.25 bits a value.

    The magnitudes are evenly spaced on the scale of the float's bit pattern, which is logarithmic by octaves and
    linear within one. They span at most seven octaves below the largest; smaller values take the smallest magnitude.
    """

    code, name, bits, scales = 5, "4bit", 4, 2
    _RANGE = 7 << 23

    def encode_rows(self, x: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = _bits(x).astype(np.int64)
        size = bits & int(_SIZE)
        most = np.where(inside, size, 0).max(axis=1, keepdims=True)
        least = np.where(inside, size, int(_SIZE)).min(axis=1, keepdims=True)
        least = np.maximum(least, most - self._RANGE)
        span = np.maximum(most - least, 1)
        level = np.where(size > least, (7 * (size - least) + (most - least) // 2) // span, 0)
        ends = np.concatenate([least, most], axis=1).astype(np.uint32).view(np.float32)
        return (bits >> 31) << 3 | level, ends

    def decode_rows(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        ends = scales.view(np.uint32).astype(np.int64)
        least, most = ends[:, :1], ends[:, 1:]
        if (least > most).any() or (most - least > self._RANGE).any():
            raise CorruptPacket("the least and largest magnitudes are out of order or too far apart")
        size = least + ((most - least) * (codes & 7) + 3) // 7
        return (size | (codes & 8) << 28).astype(np.uint32).view(np.float32)


class TwoBitValues(BlockValues):
    """2 bits: sign, and the mean of the magnitudes below or above the block's mean. 2.25 bits a value."""

    code, name, bits, scales = 6, "2bit", 2, 2

    def encode_rows(self, x: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = np.abs(x).astype(np.float64)
        middle = _in_order(size) / inside.sum(axis=1, keepdims=True)
        high = (size >= middle) & inside
        low = ~high & inside
        means = [
            _in_order(np.where(part, size, 0.0)) / np.maximum(part.sum(axis=1, keepdims=True), 1)
            for part in (low, high)
        ]
        return np.signbit(x).astype(np.int64) << 1 | high, np.concatenate(means, axis=1).astype(np.float32)

    def decode_rows(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        size = np.where(codes & 1, scales[:, 1:], scales[:, :1])
        return np.where(codes & 2, -size, size)


def _in_order(rows: np.ndarray) -> np.ndarray:
    """Sum each row in the order of its elements, as a plain loop does."""
    return np.cumsum(rows, axis=1)[:, -1:]


VALUE_CODECS: dict[str, ValueCodec] = {
    codec.name: codec
    for codec in (
        FloatValues(1, "fp32", "<f4"),
        FloatValues(2, "fp16", "<f2"),
        BFloat16Values(),
        EightBitValues(),
        FourBitValues(),
        TwoBitValues(),
    )
}
