"""Decoding and aggregation of all ranks' packets on the device."""

from __future__ import annotations

import numpy as np
import torch
import triton

from dgc_horovod.kernels.composed import ListedOutputs
from dgc_horovod.kernels.contract import Elements
from dgc_horovod.kernels.triton.decode import (
    BAD_POSITIONS,
    BITS,
    FILL_BLOCK,
    aggregate_into,
    count_ones,
    decode_positions,
    decode_values,
)
from dgc_horovod.kernels.triton.encode import CODED, HEADER_WORDS
from dgc_horovod.kernels.triton.memory import (
    EXACT,
    BucketMap,
    Recorded,
    Upload,
    addresses,
    on_host,
    using,
    value_words,
    wait_for,
)
from dgc_horovod.wire import packet
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs import VALUE_CODECS
from dgc_horovod.wire.packet import PacketFormat

_WORD = 4  # bytes
_SMALL_BLOCK_BITS, _LARGE = FILL_BLOCK.value.bit_length() - 1, 1 << 22
_FILL_WARPS = 4  # 128 threads, as many as `aggregate_into` adds elements at once


def block_bits(numel: int) -> int:
    """Return the exponent of a program's block size in `aggregate_into`, a power of two.

    A block of 2,048 gets few elements, and its program mostly waits for memory; but a small bucket needs many programs.
    """
    return _SMALL_BLOCK_BITS + 2 if numel >= _LARGE else _SMALL_BLOCK_BITS


class Filler:
    """The kernel `aggregate_into` for one bucket, and its tables.

    Args:
        bucket: layout of the bucket.
        device: device that holds the outputs.
        bits: exponent of a program's block of ``2**bits`` elements; None: `block_bits`.
    """

    def __init__(self, bucket: Bucket, device: torch.device, bits: int | None = None) -> None:
        self.bucket, self.device, self.block_bits = bucket, device, bits or block_bits(bucket.numel)
        self.map = BucketMap(bucket, 1 << self.block_bits, device)
        self._settings = Upload(device, {"outputs": (torch.int64, len(bucket.segments)), "scale": (torch.float32, 1)})
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        self._recorded = Recorded(device)
        self._back = on_host(1, torch.int32, device)

    def __call__(
        self,
        outputs: ListedOutputs,
        positions: torch.Tensor,
        values: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
        scale: float,
        fresh: bool,
    ) -> bool:
        """See `decode.aggregate_into`; return whether every element is finite."""
        self._settings.host["outputs"][:] = addresses(outputs.arrays)
        self._settings.host["scale"][:] = scale
        self._settings.send()
        given = self._settings.device

        def kernels() -> None:
            self._flag.zero_()
            aggregate_into[(self.map.blocks,)](
                given["outputs"], self.map.starts, self.map.spread, positions, values, starts, counts, given["scale"],
                self._flag, counts.numel(), values.numel() // counts.numel(), self.map.blocks,
                BLOCK_BITS=self.block_bits, FRESH=fresh, num_warps=_FILL_WARPS, **EXACT,
            )  # fmt: skip

        key = (fresh, values.numel(), counts.numel(), *addresses([positions, values, starts, counts]))
        with using(self.device):
            self._recorded.launch(key, kernels)
        self._back.copy_(self._flag, non_blocking=True)
        wait_for(self.device)
        return not int(self._back[0])

    def listed(self, outputs: ListedOutputs, contributions: list[Elements], scale: float, fresh: bool) -> bool:
        """As `__call__`, for elements on the host."""
        most = max(1, max(elements.values.size for elements in contributions))
        positions = np.zeros((len(contributions), most), np.int32)
        values = np.zeros((len(contributions), most), np.float32)
        starts = np.zeros((len(contributions), self.map.blocks + 1), np.int32)
        for rank, elements in enumerate(contributions):
            size = elements.values.size
            positions[rank, :size], values[rank, :size] = elements
            starts[rank, 1:-1] = np.searchsorted(elements.positions, self.map.bounds)
        counts = np.array([elements.values.size for elements in contributions], np.int32)
        there = [torch.from_numpy(x).to(self.device) for x in (positions, values, starts, counts)]
        return self(outputs, there[0], there[1], there[2], there[3], scale, fresh)


class TritonReceiver:
    """`contract.Receiver` for one bucket and one packet format.

    Args:
        bucket: layout of the bucket.
        wire: format of the packets.
        ranks: number of ranks, which send one packet each.
        device: device that holds the outputs.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, ranks: int, device: torch.device) -> None:
        self.wire, self.ranks, self.device = wire, ranks, device
        self._fill = Filler(bucket, device, max(block_bits(bucket.numel), wire.low_bits))
        self._high_at = HEADER_WORDS.value + triton.cdiv(wire.capacity * wire.low_bits, 32)
        self._values_at, self._scales_at = value_words(wire)
        self._bits = 32 * (self._values_at - self._high_at)
        self._chunks = triton.cdiv(self._bits, BITS.value)
        self._words, self._codec = wire.nbytes // _WORD, VALUE_CODECS[wire.values].code
        self._arrived = Upload(device, {"packets": (torch.int32, ranks * self._words), "counts": (torch.int32, ranks)})
        self._back = on_host(ranks, torch.int32, device)

        def whole(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self._ones, self._positions = whole(ranks * self._chunks), whole(ranks * wire.capacity)
        self._starts, self._problems = whole(ranks * (self._fill.map.blocks + 1)), whole(ranks)
        self._values = torch.empty(ranks * wire.capacity, device=device)
        self._recorded = Recorded(device)

    def read(self, packets: np.ndarray, counts: np.ndarray) -> None:
        """See `contract.Receiver`."""
        wire, k = self.wire, self.wire.capacity
        self._arrived.host["packets"][:] = packets.reshape(-1).view(np.int32)
        self._arrived.host["counts"][:] = counts
        self._arrived.send()
        given = self._arrived.device
        bitmap = self._words, self._high_at, self._bits, self._chunks
        chunks = (self._chunks, self.ranks)

        def kernels() -> None:
            self._problems.zero_()
            count_ones[chunks](given["packets"], self._ones, *bitmap, **EXACT)
            decode_positions[chunks](
                given["packets"], self._ones, given["counts"], self._positions, self._starts, self._problems, *bitmap,
                k, self._fill.map.blocks, LOW=wire.low_bits, BLOCK_BITS=self._fill.block_bits, **EXACT,
            )  # fmt: skip
            decode_values[(triton.cdiv(k, CODED.value), self.ranks)](
                given["packets"], given["counts"], self._positions, self._values, self._problems, self._words,
                self._values_at, self._scales_at, k, wire.numel, CODEC=self._codec, **EXACT,
            )  # fmt: skip

        with using(self.device):
            self._recorded.launch((), kernels)  # all arguments are the receiver's own memory
        self._back.copy_(self._problems, non_blocking=True)

    def aggregate_into(self, outputs: ListedOutputs, scale: float) -> bool:
        """See `contract.Receiver`. One wait, also for `read`."""
        counts = self._arrived.device["counts"]
        return self._fill(outputs, self._positions, self._values, self._starts, counts, scale, fresh=True)

    @property
    def problems(self) -> dict[int, str]:
        """See `contract.Receiver`."""
        wait_for(self.device)
        found = self._back.numpy()
        return {int(rank): _in_words(int(found[rank])) for rank in np.flatnonzero(found)}

    @property
    def contributions(self) -> list[Elements]:
        """See `contract.Receiver`."""
        positions = self._positions.view(self.ranks, -1).cpu().numpy()
        values = self._values.view(self.ranks, -1).cpu().numpy()
        counts = self._arrived.host["counts"]
        return [
            Elements(p[:n].copy(), v[:n].copy()) for p, v, n in zip(positions, values, counts.tolist(), strict=True)
        ]


def _in_words(problem: int) -> str:
    return packet.BAD_POSITIONS if problem & BAD_POSITIONS.value else packet.BAD_VALUES
