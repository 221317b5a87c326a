"""The wire format: one rank's selected elements of one bucket as one fixed-size byte string.

``header (36 bytes) | indices | values``, little-endian, each part padded to whole 32-bit words. The size
is a pure function of (numel, capacity, codecs), so Horovod's response cache always hits. The header has the
number of elements, including those rounded to zero; the unused rest of the payload is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.wire.codecs import INDEX_CODECS, VALUE_CODECS, EliasFanoIndices

MAGIC = int.from_bytes(b"DGCp", "little")
VERSION = 2
FLAG_NONFINITE, FLAG_JOINED, FLAG_CLIPS, FLAG_OVERFLOW = 1, 2, 4, 8
KNOWN_FLAGS = FLAG_NONFINITE | FLAG_JOINED | FLAG_CLIPS | FLAG_OVERFLOW

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("bucket", "<u4"),
        ("step", "<u4"),
        ("numel", "<u4"),
        ("capacity", "<u4"),
        ("count", "<u4"),
        ("index_codec", "u1"),
        ("value_codec", "u1"),
        ("reserved", "<u2"),
        ("checksum", "<u4"),
    ]
)
CHECKSUM_FACTOR = 0x9E3779B97F4A7C15
# Indices of words of the header; the flags are the upper half of theirs
FLAGS_WORD, COUNT_WORD, CHECKSUM_WORD = (HEADER.fields[name][1] // 4 for name in ("flags", "count", "checksum"))  # type: ignore[index]
# Problems that the native coder reports
BAD_POSITIONS = "positions do not ascend within the bucket"
BAD_VALUES = "values or scales that no sender writes"


@dataclass(frozen=True)
class PacketFormat:
    """The format of one bucket's packets, equal on all ranks.

    Args:
        bucket: index of the bucket, from 0.
        numel: number of elements in the bucket, below 2^31.
        capacity: largest number of elements that a packet carries.
        values: name of the value codec; `indices`: name of the index codec.
    """

    bucket: int
    numel: int
    capacity: int
    values: str = "fp32"
    indices: str = "elias-fano"

    @cached_property
    def values_at(self) -> int:
        """Byte offset of the values in the body. The body is the packet without its header."""
        return INDEX_CODECS[self.indices].nbytes(self.numel, self.capacity)

    @cached_property
    def scales_at(self) -> int:
        """Byte offset in the body of the scales of the values' blocks."""
        return self.values_at + VALUE_CODECS[self.values].scales_at(self.capacity)

    @cached_property
    def body_bytes(self) -> int:
        """Bytes of a packet without its header."""
        return self.values_at + VALUE_CODECS[self.values].nbytes(self.capacity)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a packet, independent of its content."""
        return HEADER.itemsize + self.body_bytes

    @cached_property
    def low_bits(self) -> int:
        """Elias-Fano's parameter, for native coders."""
        return EliasFanoIndices.low_bits(self.numel, self.capacity)

    @cached_property
    def constants(self) -> np.ndarray:
        """A header with the fields that all packets share: all but step, flags, count and checksum."""
        header = np.zeros(1, HEADER)
        for name, value in self.expected(0).items():
            header[name] = value
        return header

    @cached_property
    def _agreed(self) -> np.ndarray:
        """Mask of the header bytes that `constants` defines."""
        agreed = np.zeros(HEADER.itemsize, bool)
        for name in self.expected(0).keys() - {"step"}:
            dtype, start = HEADER.fields[name][:2]  # type: ignore[index]
            agreed[start : start + dtype.itemsize] = True
        return agreed

    def expected(self, step: int) -> dict[str, int]:
        """Header fields that are equal in all packets of one step."""
        return {
            "magic": MAGIC,
            "version": VERSION,
            "bucket": self.bucket,
            "step": step % 2**32,
            "numel": self.numel,
            "capacity": self.capacity,
            "index_codec": INDEX_CODECS[self.indices].code,
            "value_codec": VALUE_CODECS[self.values].code,
            "reserved": 0,
        }

    def encode(
        self,
        coder: Coder,
        positions: np.ndarray,
        values: np.ndarray,
        step: int,
        flags: int,
        out: np.ndarray,
        decoded: np.ndarray,
    ) -> int:
        """Write a packet into `out`, and the values as receivers decode them into `decoded`.

        Args:
            coder: coder that writes the body.
            positions: positions of the elements, int32, ascending and unique, at most `capacity`.
            values: values at them, float32, finite.
            step: schedule step of the sender, >= 0.
            flags: a sum of FLAG_NONFINITE (a gradient is not finite), FLAG_JOINED (the sender is in join), FLAG_CLIPS
                (the sender's script clips updates), FLAG_OVERFLOW (a shard owner's sums overflow fp32).
            out: buffer of the packet, `nbytes` uint8, overwritten.
            decoded: buffer for the values, float32, of their size.

        Returns:
            The number of decoded values that are zero.
        """
        out.fill(0)
        zeros = coder.encode(self, positions, values, out[HEADER.itemsize :], decoded)
        header = out[: HEADER.itemsize].view(HEADER)
        header[:] = self.constants
        header["step"], header["flags"], header["count"] = step % 2**32, flags, positions.size
        header["checksum"] = coder.checksum(out)
        return zeros

    def read_headers(self, coder: Coder, packets: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Check the headers of all ranks' packets, (ranks, nbytes) uint8; return their counts and flags.

        Raises:
            CorruptPacket: magic, checksum, count or flags are invalid.
            RankMismatch: a packet is valid, but of another version, bucket, step, size or codec.
        """
        headers = np.ascontiguousarray(packets[:, : HEADER.itemsize]).view(HEADER)[:, 0]
        sums = np.array([coder.checksum(packet) for packet in packets], np.uint32)
        damaged = (headers["magic"] != MAGIC) | (headers["checksum"] != sums)
        for rank in np.flatnonzero(damaged).tolist():
            raise self.corrupt(rank, "damaged (magic or checksum)")
        different = ((packets[:, : HEADER.itemsize] != self.constants.view(np.uint8)) & self._agreed).any(axis=1)
        for rank in np.flatnonzero(different | (headers["step"] != step % 2**32)).tolist():
            raise self._mismatch(rank, headers[rank], step)
        invalid = (headers["count"] > self.capacity) | ((headers["flags"] & ~np.uint16(KNOWN_FLAGS)) != 0)
        for rank in np.flatnonzero(invalid).tolist():
            count, flags = headers["count"][rank], headers["flags"][rank]
            raise self.corrupt(rank, f"invalid: count {count} (at most {self.capacity}), flags {flags}")
        return headers["count"].astype(np.int64), headers["flags"]

    def _mismatch(self, rank: int, header: np.ndarray, step: int) -> RankMismatch:
        name, ours = next((name, ours) for name, ours in self.expected(step).items() if header[name] != ours)
        return RankMismatch(
            f"bucket {self.bucket}: rank {rank} sent a packet with {name} {header[name]}, expected {ours}; all ranks "
            "must run the same version, config, model and number of steps"
        )

    def decode(
        self, coder: Coder, packet: np.ndarray, count: int, rank: int, positions: np.ndarray, values: np.ndarray
    ) -> None:
        """Decode the elements of one packet whose header has been checked.

        Args:
            coder: coder that reads the body.
            packet: packet of `nbytes` uint8.
            count: number of its elements, as its header says.
            rank: index of the sender, for the message.
            positions, values: buffers of `count` elements, int32 and float32, filled in.

        Raises:
            CorruptPacket: the positions are not ascending within the bucket, or a value is not finite.
        """
        if problem := coder.decode(self, packet[HEADER.itemsize :], count, positions, values):
            raise self.corrupt(rank, f"invalid: {problem}")

    def corrupt(self, rank: int, what: str) -> CorruptPacket:
        """Return the error for a packet of `rank`; `what` is the predicate of its sentence."""
        return CorruptPacket(f"bucket {self.bucket}: the packet of rank {rank} is {what}")


class Coder(Protocol):
    """Writes and reads packets' bodies, byte for byte as `NumpyCoder` does."""

    def supports(self, wire: PacketFormat) -> bool:
        """Whether this coder has both codecs of `wire`; `coder_for` falls back to `NumpyCoder`."""

    def encode(
        self, wire: PacketFormat, positions: np.ndarray, values: np.ndarray, body: np.ndarray, decoded: np.ndarray
    ) -> int:
        """Write the elements into a body of zeros and the decoded values into `decoded`; return how many are zero."""

    def decode(
        self, wire: PacketFormat, body: np.ndarray, count: int, positions: np.ndarray, values: np.ndarray
    ) -> str:
        """Decode `count` elements of a body; return a description of the problem, or ""."""

    def checksum(self, packet: np.ndarray) -> int:
        """Return the upper half of ``F * (sum of w_i * word_i)`` modulo 2^64, without the checksum's own word.

        The weights are ``2*i + 1``; F is an odd constant that spreads every bit upwards. The order of the sum does not
        matter. A change goes undetected once in 2^32 times.
        """


class NumpyCoder:
    """The reference: packets in NumPy."""

    def supports(self, wire: PacketFormat) -> bool:
        return True

    def encode(
        self, wire: PacketFormat, positions: np.ndarray, values: np.ndarray, body: np.ndarray, decoded: np.ndarray
    ) -> int:
        INDEX_CODECS[wire.indices].encode(positions, wire.numel, wire.capacity, body[: wire.values_at])
        codec, part = VALUE_CODECS[wire.values], body[wire.values_at :]
        codec.encode(values, wire.capacity, part)
        decoded[:] = codec.decode(part, values.size, wire.capacity)
        return int(values.size - np.count_nonzero(decoded))

    def decode(
        self, wire: PacketFormat, body: np.ndarray, count: int, positions: np.ndarray, values: np.ndarray
    ) -> str:
        try:
            positions[:] = INDEX_CODECS[wire.indices].decode(body[: wire.values_at], count, wire.numel, wire.capacity)
            values[:] = VALUE_CODECS[wire.values].decode(body[wire.values_at :], count, wire.capacity)
        except CorruptPacket as error:
            return str(error)
        return ""

    def checksum(self, packet: np.ndarray) -> int:
        words = packet.view("<u4").astype(np.uint64)
        words[CHECKSUM_WORD] = 0
        total = int(np.dot(words, np.arange(1, 2 * words.size, 2, dtype=np.uint64)))
        return (total * CHECKSUM_FACTOR % 2**64) >> 32


_NUMPY = NumpyCoder()


def coder_for(wire: PacketFormat, preferred: Coder) -> Coder:
    """Return `preferred` if it has both codecs of `wire`, else the NumPy coder."""
    return preferred if preferred.supports(wire) else _NUMPY
