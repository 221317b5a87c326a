"""Packets for tests: made, read, changed and sealed again."""

from __future__ import annotations

from typing import Any

import numpy as np

from dgc_horovod.kernels.native.kernels import NativeKernels
from dgc_horovod.wire.packet import HEADER, Coder, NumpyCoder, PacketFormat, coder_for

NATIVE: Coder = NativeKernels().coder
CODERS: dict[str, Coder] = {"numpy": NumpyCoder(), "native": NATIVE}


def random_elements(wire: PacketFormat, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ascending positions and values as a selection leaves them."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(wire.numel, count, replace=False)).astype(np.int32)
    values = rng.standard_normal(count) * np.exp(rng.standard_normal(count))
    return positions, values.astype(np.float32)


def write(
    coder: Coder, wire: PacketFormat, positions: Any, values: Any, step: int = 7, flags: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A packet in poisoned memory, and the values as decoded."""
    out, decoded = np.full(wire.nbytes, 0xAA, np.uint8), np.full(len(positions), np.nan, np.float32)
    zeros = wire.encode(coder_for(wire, coder), positions, values, step, flags, out, decoded)
    assert zeros == np.count_nonzero(decoded == 0)
    return out, decoded


def read(
    coder: Coder, wire: PacketFormat, packet: np.ndarray, step: int = 7, rank: int = 0
) -> tuple[np.ndarray, np.ndarray, int]:
    """Positions, values and flags of the packet of `rank`, all others before it the same."""
    packets = np.stack([packet] * (rank + 1)) if rank == 0 else np.stack([sound_packet(wire, step)] * rank + [packet])
    coder = coder_for(wire, coder)
    counts, flags = wire.read_headers(coder, packets, step)
    count = int(counts[rank])
    positions, values = np.full(count, -1, np.int32), np.full(count, np.nan, np.float32)
    wire.decode(coder, packets[rank], count, rank, positions, values)
    return positions, values, int(flags[rank])


def sound_packet(wire: PacketFormat, step: int) -> np.ndarray:
    """A packet of nothing."""
    return write(CODERS["numpy"], wire, np.empty(0, np.int32), np.empty(0, np.float32), step)[0]


def seal(packet: np.ndarray) -> np.ndarray:
    """Give a changed packet a checksum that is right again."""
    packet[: HEADER.itemsize].view(HEADER)["checksum"] = NATIVE.checksum(packet)
    return packet
