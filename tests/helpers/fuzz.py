"""Changed packets, fed to the decoder: ``python -m tests.helpers.fuzz``. Prints what became of them, as JSON.

Every packet must end in CorruptPacket or RankMismatch, or in elements that a sender could have written; nothing
may be written outside the room given for them. Half of the packets are sealed again after the change, so that the
checks behind the checksum are what is tried.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np

from dgc_horovod.errors import CorruptPacket, RankMismatch
from dgc_horovod.kernels.native import library
from dgc_horovod.kernels.native.kernels import NativeCoder
from dgc_horovod.wire.codecs import VALUE_CODECS
from dgc_horovod.wire.packet import CHECKSUM_WORD, HEADER, Coder, NumpyCoder, PacketFormat, coder_for

STEP, GUARD = 7, 64
SHAPES = [(1, 1), (40, 40), (1000, 20), (5000, 700), (70_000, 300)]  # numel, capacity


def sound_packets(coder: Coder) -> list[tuple[PacketFormat, np.ndarray]]:
    """A packet of every codec and size."""
    rng = np.random.default_rng(0)
    packets = []
    for numel, capacity in SHAPES:
        for values in VALUE_CODECS:
            for indices in ("elias-fano", *(["every"] if capacity == numel else [])):
                wire = PacketFormat(1, numel, capacity, values, indices)
                count = capacity if indices == "every" else int(rng.integers(0, capacity + 1))
                positions = np.sort(rng.choice(numel, count, replace=False)).astype(np.int32)
                floats = rng.standard_normal(count).astype(np.float32)
                out = np.empty(wire.nbytes, np.uint8)
                wire.encode(coder, positions, floats, STEP, 0, out, np.empty(count, np.float32))
                packets.append((wire, out))
    return packets


def change(packet: np.ndarray, rng: np.random.Generator) -> None:
    """One to four changes: bits, bytes, whole words, stretches; more often in the header than it is long."""
    words = packet.view("<u4")
    for _ in range(rng.integers(1, 5)):
        within = HEADER.itemsize if rng.random() < 0.3 else packet.size
        at = int(rng.integers(within))
        kind = rng.integers(5)
        if kind == 0:
            packet[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            packet[at] = rng.integers(256)
        elif kind == 2:
            words[at // 4] = rng.choice(np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7F800000], np.uint32))
        elif kind == 3:
            packet[at : at + int(rng.integers(1, 40))] = rng.integers(256)
        else:
            words[at // 4] = (int(words[at // 4]) + int(rng.integers(-3, 4))) % 2**32


def outcome(coder: Coder, wire: PacketFormat, packet: np.ndarray) -> str:
    """What reading the packet ends in; AssertionError where it must not end so."""
    coder = coder_for(wire, coder)
    try:
        counts, _ = wire.read_headers(coder, packet[None], STEP)
        count = int(counts[0])
        room = np.full(count + 2 * GUARD, 0x5A5A5A5A, np.int32), np.full(count + 2 * GUARD, -1.5, np.float32)
        positions, values = (memory[GUARD : GUARD + count] for memory in room)
        try:
            wire.decode(coder, packet, count, 0, positions, values)
        finally:
            for memory, guard in zip(room, (0x5A5A5A5A, -1.5), strict=True):
                edges = np.concatenate([memory[:GUARD], memory[GUARD + count :]])
                assert (edges == guard).all(), "written outside the room"
    except (CorruptPacket, RankMismatch) as error:
        return type(error).__name__
    assert count <= wire.capacity and np.isfinite(values).all()
    assert count == 0 or (positions[0] >= 0 and positions[-1] < wire.numel and (np.diff(positions) > 0).all())
    return "valid"


def run(coder: Coder, packets: int, seed: int, against: Coder | None = None) -> dict[str, int]:
    """Change `packets` packets; with `against`, its outcome must be the same."""
    rng = np.random.default_rng(seed)
    originals, outcomes = sound_packets(NumpyCoder()), Counter[str]()
    for number in range(packets):
        wire, original = originals[int(rng.integers(len(originals)))]
        packet = original.copy()
        change(packet, rng)
        sealed = number % 2 == 0
        if sealed:
            packet.view("<u4")[CHECKSUM_WORD] = coder.checksum(packet)
        end = outcome(coder, wire, packet)
        assert sealed or end != "valid" or (packet == original).all(), "a change went unseen by the checksum"
        if against is not None:
            assert outcome(against, wire, packet) == end, f"packet {number} of seed {seed}: the coders disagree"
        outcomes[f"{'sealed' if sealed else 'unsealed'} {end}"] += 1
    return dict(outcomes)


def main() -> None:
    """Run with the native coder of a given library."""
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--packets", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, help="built elsewhere, e.g. with -fsanitize=address")
    args = parser.parse_args()
    print(json.dumps(run(NativeCoder(library.load(args.library)), args.packets, args.seed)))


if __name__ == "__main__":
    main()
