"""Decoding and aggregation of all ranks' packets on the device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
import triton

from dgc_horovod.kernels.contract import Elements
from dgc_horovod.kernels.reference import ListedOutputs
from dgc_horovod.kernels.triton.decode import BITS, FILL_BLOCK, aggregate_into, decode_positions, decode_values, survey
from dgc_horovod.kernels.triton.encode import CODED, HEADER_WORDS, SUMMED
from dgc_horovod.kernels.triton.memory import (
    EXACT,
    BucketMap,
    Fence,
    Recorded,
    Upload,
    addresses,
    is_pinned,
    on_host,
    using,
    value_words,
)
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs import VALUE_CODECS
from dgc_horovod.wire.packet import HEADER, PacketFormat

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

    def launch(self, given: Mapping[str, torch.Tensor], flag: torch.Tensor, fresh: bool) -> None:
        """Start `decode.aggregate_into`.

        Args:
            given: its arguments ``outputs``, ``scale``, ``positions``, ``values``, ``starts`` and ``counts``.
            flag: int32 zero, set to 1 if an element is not finite.
            fresh: see `Kernels.aggregate_into`.
        """
        ranks = given["counts"].numel()
        aggregate_into[(self.map.blocks,)](
            given["outputs"], self.map.starts, self.map.spread, given["positions"], given["values"], given["starts"],
            given["counts"], given["scale"], flag, ranks, given["values"].numel() // ranks, self.map.blocks,
            BLOCK_BITS=self.block_bits, FRESH=fresh, num_warps=_FILL_WARPS, **EXACT,
        )  # fmt: skip

    def listed(self, outputs: ListedOutputs, contributions: list[Elements], scale: float, fresh: bool) -> bool:
        """`Kernels.aggregate_into` of elements on the host, sent by one copy; one wait."""
        ranks, most = len(contributions), max(1, max(elements.values.size for elements in contributions))
        sent = Upload(
            self.device,
            {
                **_settings(self.bucket),
                "positions": (torch.int32, ranks * most),
                "values": (torch.float32, ranks * most),
                "starts": (torch.int32, ranks * (self.map.blocks + 1)),
                "counts": (torch.int32, ranks),
                "flag": (torch.int32, 1),
            },
        )
        host = sent.host
        for rank, elements in enumerate(contributions):
            own = slice(rank * most, rank * most + elements.values.size)
            host["positions"][own], host["values"][own] = elements
            starts = host["starts"].reshape(ranks, -1)[rank]
            starts[1:-1] = np.searchsorted(elements.positions, self.map.bounds)
        host["counts"][:] = [elements.values.size for elements in contributions]
        host["outputs"][:], host["scale"][:] = addresses(outputs.arrays), scale
        with using(self.device):
            sent.send()
            self.launch(sent.device, sent.device["flag"], fresh)
        return not int(sent.device["flag"])


def _settings(bucket: Bucket) -> dict[str, tuple[torch.dtype, int]]:
    """Return the fields of an Upload that `Filler.launch` needs for every kind of elements."""
    return {"outputs": (torch.int64, len(bucket.segments)), "scale": (torch.float32, 1)}


class TritonReceiver:
    """`contract.Receiver` for one bucket and one packet format.

    The copies to the device, the kernels, and the copy of their report to the host are one graph. Only packets in
    pinned memory are copied before it, from where they are.

    Args:
        bucket: layout of the bucket.
        wire: format of the packets.
        ranks: number of ranks, which send one packet each.
        device: device that holds the outputs.
        fence: fence of the device.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, ranks: int, device: torch.device, fence: Fence) -> None:
        self.wire, self.ranks, self.device, self._fence, self._mark = wire, ranks, device, fence, 0
        self.flags = np.zeros(ranks, np.int32)
        self.refused: list[int] = []
        self._fill = Filler(bucket, device, max(block_bits(bucket.numel), wire.low_bits))
        self._high_at = HEADER_WORDS.value + triton.cdiv(wire.capacity * wire.low_bits, 32)
        self._values_at, self._scales_at = value_words(wire)
        self._bits = 32 * (self._values_at - self._high_at)
        self._chunks = triton.cdiv(self._bits, BITS.value)
        self._words, self._codec = wire.nbytes // _WORD, VALUE_CODECS[wire.values].code
        self._arrived = Upload(device, {"packets": (torch.uint8, ranks * wire.nbytes)})
        self._given = Upload(device, {"header": (torch.int32, HEADER_WORDS.value), **_settings(bucket)})
        self._header = self._given.host["header"].view(HEADER)
        self._header[:] = wire.constants

        def whole(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        # zero at the begin of a step: sums of 64 bits; the report: refused, flags, counts, and whether it is not finite
        self._board = torch.zeros(5 * ranks + 1, dtype=torch.int32, device=device)
        self._totals = self._board[: 2 * ranks].view(torch.int64)
        self._refused, self._flags, counts = self._board[2 * ranks : -1].view(3, ranks)
        self._back = on_host(3 * ranks + 1, torch.int32, device)
        self._ones = whole(ranks * self._chunks)
        self._elements = {
            "positions": whole(ranks * wire.capacity),
            "values": torch.empty(ranks * wire.capacity, device=device),
            "starts": whole(ranks * (self._fill.map.blocks + 1)),
            "counts": counts,
        }
        self._recorded = Recorded(device)

    def aggregate_into(self, packets: np.ndarray, step: int, outputs: ListedOutputs, scale: float) -> None:
        """See `contract.Receiver`."""
        self._fence.wait(self._mark)  # the device may still read the memory of a step that was given up
        received, host = torch.from_numpy(packets.reshape(-1)), self._given.host
        pinned = is_pinned(received)
        if pinned:
            self._arrived.device["packets"].copy_(received, non_blocking=True)
        else:  # the driver copies from pageable memory only while the host waits for the stream
            self._arrived.host["packets"][:] = packets.reshape(-1)
        self._header["step"] = step % 2**32
        host["outputs"][:], host["scale"][:] = addresses(outputs.arrays), scale
        with using(self.device):
            # all other arguments are the receiver's own memory
            self._recorded.launch((pinned,), partial(self._kernels, pinned))
        self._mark = self._fence.mark()

    def _kernels(self, pinned: bool) -> None:
        wire, k, given = self.wire, self.wire.capacity, {**self._given.device, **self._elements}
        packets = self._arrived.device["packets"].view(torch.int32)
        counts, positions, values = (given[name] for name in ("counts", "positions", "values"))
        bitmap = self._words, self._high_at, self._bits, self._chunks, k
        if not pinned:
            self._arrived.send()
        self._given.send()
        self._board.zero_()
        survey[(max(self._chunks, triton.cdiv(self._words, SUMMED.value)), self.ranks)](
            packets, self._totals, self._ones, counts, *bitmap, **EXACT
        )
        decode_positions[(self._chunks, self.ranks)](
            packets, given["header"], self._totals, self._ones, counts, positions, given["starts"], self._flags,
            self._refused, *bitmap, self._fill.map.blocks, LOW=wire.low_bits, BLOCK_BITS=self._fill.block_bits,
            **EXACT,
        )  # fmt: skip
        decode_values[(triton.cdiv(k, CODED.value), self.ranks)](
            packets, counts, positions, values, self._refused, self._words,
            self._values_at, self._scales_at, k, wire.numel, CODEC=self._codec, **EXACT,
        )  # fmt: skip
        self._fill.launch(given, self._board[-1:], fresh=True)
        self._back.copy_(self._board[-self._back.numel() :], non_blocking=True)

    def settle(self) -> bool:
        """See `contract.Receiver`."""
        self._fence.wait(self._mark)
        report = self._back.numpy()
        self.refused, self.flags = np.flatnonzero(report[: self.ranks]).tolist(), report[self.ranks : 2 * self.ranks]
        return not report[-1]

    @property
    def contributions(self) -> list[Elements]:
        """See `contract.Receiver`."""
        positions, values = (self._elements[x].view(self.ranks, -1).cpu().numpy() for x in ("positions", "values"))
        counts = self._elements["counts"].tolist()
        return [Elements(p[:n].copy(), v[:n].copy()) for p, v, n in zip(positions, values, counts, strict=True)]
