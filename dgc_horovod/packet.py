"""The wire format: one rank's selected elements of one bucket as one fixed-size byte string.

``header (36 bytes) | indices | values``, little-endian, each part padded to whole 32-bit words. The size
is a pure function of (numel, capacity, codecs), so that Horovod's response cache always hits; the count
of elements really sent stands in the header and the rest of the payload is zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dgc_horovod.errors import CorruptPacket, RankMismatch

MAGIC = int.from_bytes(b"DGCp", "little")
VERSION = 1
FLAG_NONFINITE = 1

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


def _words(nbytes: int) -> int:
    return -(-nbytes // 4) * 4


class Int32Indices:
    """Positions as plain int32: 32 bits each."""

    code, name = 1, "int32"

    def nbytes(self, numel: int, capacity: int) -> int:
        return 4 * capacity

    def encode(self, positions: np.ndarray, numel: int, out: np.ndarray) -> None:
        out[: 4 * positions.size].view("<i4")[:] = positions

    def decode(self, data: np.ndarray, count: int, numel: int) -> np.ndarray:
        """Ascending unique positions in [0, numel), or CorruptPacket."""
        positions = data[: 4 * count].view("<i4").astype(np.int64)
        if count and (positions[0] < 0 or positions[-1] >= numel or (np.diff(positions) <= 0).any()):
            raise CorruptPacket(f"positions are not ascending within [0, {numel})")
        return positions


class FloatValues:
    """Values as fp32 or fp16; fp16 saturates at +-65504 and the rest stays in the residual."""

    def __init__(self, code: int, name: str, dtype: str) -> None:
        self.code, self.name, self.dtype = code, name, np.dtype(dtype)
        self._largest = float(np.finfo(self.dtype).max)

    def nbytes(self, capacity: int) -> int:
        return self.dtype.itemsize * capacity

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        out[: self.nbytes(values.size)].view(self.dtype)[:] = np.clip(values, -self._largest, self._largest)

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        return data[: self.nbytes(count)].view(self.dtype).astype(np.float32)


class BFloat16Values:
    """Values as bfloat16, rounded to nearest even, saturating at its largest finite number."""

    code, name = 3, "bf16"
    _LARGEST = np.uint32(0x7F7F0000)

    def nbytes(self, capacity: int) -> int:
        return 2 * capacity

    def encode(self, values: np.ndarray, out: np.ndarray) -> None:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        size = np.minimum(bits & np.uint32(0x7FFFFFFF), self._LARGEST)
        rounded = (size + np.uint32(0x7FFF) + ((size >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[: 2 * values.size].view("<u2")[:] = rounded | ((bits >> np.uint32(16)) & np.uint32(0x8000))

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        return (data[: 2 * count].view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


INDEX_CODECS = {codec.name: codec for codec in (Int32Indices(),)}
VALUE_CODECS = {
    codec.name: codec for codec in (FloatValues(1, "fp32", "<f4"), FloatValues(2, "fp16", "<f2"), BFloat16Values())
}


@dataclass(frozen=True)
class PacketFormat:
    """What the ranks must agree on to read each other's packets of one bucket.

    Args:
        bucket: its index.
        numel: elements in the bucket, below 2^31.
        capacity: most elements a packet can carry.
        values: name of the value codec; `indices` of the index codec.
    """

    bucket: int
    numel: int
    capacity: int
    values: str = "fp32"
    indices: str = "int32"

    @property
    def coded_bytes(self) -> int:
        """Size of a packet without its header."""
        return self.nbytes - HEADER.itemsize

    @property
    def nbytes(self) -> int:
        """Size of a packet, whatever it carries."""
        return self._values_at + _words(VALUE_CODECS[self.values].nbytes(self.capacity))

    @property
    def _values_at(self) -> int:
        return HEADER.itemsize + _words(INDEX_CODECS[self.indices].nbytes(self.numel, self.capacity))

    def expected(self, step: int) -> dict[str, int]:
        """The header fields in which all packets of one step must agree."""
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

    def encode(self, positions: np.ndarray, values: np.ndarray, step: int, flags: int, out: np.ndarray) -> np.ndarray:
        """Write a packet into `out`; returns the values as the receivers will decode them.

        Args:
            positions: ascending unique positions, at most `capacity`.
            values: the float32 values there, finite.
            step: schedule step of the sender.
            flags: FLAG_NONFINITE or 0.
            out: `nbytes` uint8, overwritten whole.
        """
        out.fill(0)
        INDEX_CODECS[self.indices].encode(positions, self.numel, out[HEADER.itemsize : self._values_at])
        body = out[self._values_at :]
        VALUE_CODECS[self.values].encode(values, body)
        header = out[: HEADER.itemsize].view(HEADER)[0]
        for name, value in self.expected(step).items():
            header[name] = value
        header["flags"], header["count"] = flags, positions.size
        header["checksum"] = checksum(out)
        return VALUE_CODECS[self.values].decode(body, positions.size)

    def decode(self, packet: np.ndarray, step: int, rank: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Read and check one packet; returns positions, float32 values and flags.

        Args:
            packet: `nbytes` uint8.
            step: schedule step of the reader; the sender's must be the same.
            rank: the sender, for the message.

        Raises:
            CorruptPacket: magic, checksum, count, positions or values are impossible.
            RankMismatch: the packet is sound, but of another version, bucket, step, size or codec.
        """
        header = packet[: HEADER.itemsize].view(HEADER)[0]
        if header["magic"] != MAGIC or header["checksum"] != checksum(packet):
            raise CorruptPacket(f"bucket {self.bucket}: the packet of rank {rank} is damaged (magic or checksum)")
        for name, ours in self.expected(step).items():
            if header[name] != ours:
                raise RankMismatch(
                    f"bucket {self.bucket}: rank {rank} sent a packet with {name} {header[name]}, here it is {ours}; "
                    "all ranks must run the same version, config, model and number of steps"
                )
        count, flags = int(header["count"]), int(header["flags"])
        if count > self.capacity or flags & ~FLAG_NONFINITE:
            raise CorruptPacket(
                f"bucket {self.bucket}: the packet of rank {rank} says count {count} (at most {self.capacity}), "
                f"flags {flags}"
            )
        try:
            positions = INDEX_CODECS[self.indices].decode(packet[HEADER.itemsize : self._values_at], count, self.numel)
        except CorruptPacket as error:
            raise CorruptPacket(f"bucket {self.bucket}: the packet of rank {rank}: {error}") from None
        values = VALUE_CODECS[self.values].decode(packet[self._values_at :], count)
        if not np.isfinite(values).all():
            raise CorruptPacket(f"bucket {self.bucket}: the packet of rank {rank} holds values that are not finite")
        return positions, values, flags


def checksum(packet: np.ndarray) -> int:
    """Sum of the packet's 32-bit words, each times an odd weight, modulo 2^32, without the checksum's own.

    Odd weights are invertible, so no change of a single word goes unseen; a sum can be taken in any order.
    """
    words = packet.view("<u4")
    weights = np.arange(1, 2 * words.size, 2, dtype=np.uint32)
    own = HEADER.fields["checksum"][1] // 4  # type: ignore[index]
    total = int(np.dot(words, weights)) - int(words[own]) * int(weights[own])
    return total % 2**32
