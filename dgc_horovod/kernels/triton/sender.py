"""A whole step of compression on the device: pass, exact selection, packet, u and v after it; the host waits once.

Two copies, a memset and six kernels: the settings go there, packet and positions come back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from dgc_horovod.kernels.composed import ListedGradients
from dgc_horovod.kernels.contract import AccumulateResult, Elements, State
from dgc_horovod.kernels.triton.accumulate import BLOCK, LEAST, NOTED, READY, ZEROS
from dgc_horovod.kernels.triton.bucket_pass import HISTOGRAM, REPORT, BucketPass, alike, seen
from dgc_horovod.kernels.triton.encode import CHECKSUM, CODED, SUMMED, encode, update_residual
from dgc_horovod.kernels.triton.memory import EXACT, Recorded, bits_of, is_narrow, on_host, using, value_words, wait_for
from dgc_horovod.kernels.triton.select import FINE_BINS, GROUP, LIST_BLOCK, count, gather, refine
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs import VALUE_CODECS
from dgc_horovod.wire.packet import CHECKSUM_FACTOR, CHECKSUM_WORD, PacketFormat

_WORD = 4  # bytes
_ALIGNED = 4  # words; kernels are compiled anew for what is less


@dataclass(frozen=True)
class DeviceSentRecord:
    """`contract.SentRecord` on the device; its memory is used again at the next step."""

    count: int
    min_magnitude: float
    positions: np.ndarray
    device_positions: torch.Tensor
    values: torch.Tensor
    masked: torch.Tensor | None

    @property
    def elements(self) -> Elements:
        """A copy on the host."""
        return Elements(self.positions.copy(), self.values.cpu().numpy().copy())

    def rollback(self, state: State) -> None:
        """u and v as they were before the elements were taken out."""
        at = self.device_positions.long()
        state.v[at] = self.values
        if self.masked is not None:
            assert state.u is not None
            state.u[at] = self.masked.to(state.u.dtype)


class TritonSender:
    """`contract.Sender` for one bucket and one form of packet.

    Args:
        bucket: layout of the bucket.
        wire: format of the packet; `wire.capacity` elements are sent at each step.
        max_candidates: largest number of candidates.
        device: device that holds u and v.
    """

    def __init__(self, bucket: Bucket, wire: PacketFormat, max_candidates: int, device: torch.device) -> None:
        self.wire, self.max_candidates, self.device, k = wire, max_candidates, device, wire.capacity
        words = wire.nbytes // _WORD
        sizes = [REPORT, words, k, HISTOGRAM, FINE_BINS.value]
        starts = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
        self._board = torch.zeros(starts[-1], dtype=torch.int32, device=device)  # what a step begins with as zeros
        parts = (self._board[start:][:size] for start, size in zip(starts, sizes, strict=False))
        self._report, self._packet, self._positions, self._histogram, self._fine = parts
        self._back = on_host(starts[3], torch.int32, device)  # report, packet and positions, by one copy
        self.payload = self._back[starts[1] :][:words].numpy().view(np.uint8)
        self._host_positions = self._back[starts[2] :][:k].numpy()

        def whole(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        blocks = triton.cdiv(bucket.numel, BLOCK.value)
        groups = triton.cdiv(blocks, GROUP.value)
        self._larger, self._equal = whole(blocks), whole(blocks)
        self._larger_sums, self._equal_sums = whole(groups), whole(groups)
        self._values, self._decoded, self._masked = (torch.empty(k, device=device) for _ in range(3))
        self._codec, self._value_words = VALUE_CODECS[wire.values].code, value_words(wire)
        self._recorded = Recorded(device)
        self._header = wire.constants.copy()
        self._header["count"] = k

    def takes(self, gradients: ListedGradients) -> bool:
        """See `contract.Sender`."""
        return alike(gradients)

    def send(
        self, gradients: Any, state: State, scale: float, candidate_threshold: float, step: int, masks: bool
    ) -> tuple[AccumulateResult, DeviceSentRecord | None]:
        """See `contract.Sender`."""
        taking: BucketPass = gradients.taking
        taking.make_room(self.max_candidates)
        self._header["step"] = step % 2**32
        taking.settings.host["header"][:] = self._header.view(np.int32)
        form = taking.prepare(gradients, scale, [candidate_threshold] * len(gradients.arrays))

        def kernels() -> None:
            self._board.zero_()
            taking.launch(form, state, self._report, self._histogram)
            self._select(taking)
            self._write(taking.settings.device["header"], state, masks)

        with using(self.device):
            self._recorded.launch((form, masks, *_places(taking, state)), kernels)
            self._back.copy_(self._board[: self._back.numel()], non_blocking=True)
        wait_for(self.device)
        gradients.arrays = [None] * len(gradients.arrays)
        return self._seen_and_sent(taking, masks)

    def _select(self, taken: BucketPass) -> None:
        k, max_candidates, blocks = self.wire.capacity, taken.max_candidates, taken.map.blocks
        thresholds = taken.settings.device["thresholds"]
        refine[(triton.cdiv(max_candidates, LIST_BLOCK.value),)](
            taken.values, thresholds, self._report, self._histogram, self._fine, k, max_candidates, **EXACT
        )
        per_block = taken.bases, taken.counts, self._larger, self._equal, self._larger_sums, self._equal_sums
        groups = (triton.cdiv(blocks, GROUP.value),)
        count[groups](
            taken.values,
            thresholds,
            self._report,
            self._histogram,
            self._fine,
            *per_block,
            k,
            max_candidates,
            blocks,
            **EXACT,
        )
        gather[groups](
            taken.positions, taken.values, self._report, *per_block, self._positions, self._values, blocks, **EXACT
        )

    def _write(self, header: torch.Tensor, state: State, masks: bool) -> None:
        wire, k, words = self.wire, self.wire.capacity, self._packet.numel()
        encode[(triton.cdiv(k, CODED.value),)](
            self._positions, self._values, self._decoded, self._report, self._packet, header, k,
            *self._value_words, LOW=wire.low_bits, CODEC=self._codec, **EXACT,
        )  # fmt: skip
        update_residual[(triton.cdiv(max(k, words), SUMMED.value),)](
            self._positions, self._values, self._decoded, self._masked, state.v, bits_of(state.u) if masks else state.v,
            self._report, self._packet, k, words, MASKS=masks, NARROW=is_narrow(state.u), **EXACT,
        )  # fmt: skip

    def _seen_and_sent(self, taken: BucketPass, masks: bool) -> tuple[AccumulateResult, DeviceSentRecord | None]:
        report = self._back[:REPORT].numpy()
        if not report[READY.value] or report[ZEROS.value]:
            return seen(report, taken.candidates), None
        total = int(report[CHECKSUM.value : CHECKSUM.value + 2].view(np.uint64)[0])
        self.payload.view(np.uint32)[CHECKSUM_WORD] = (total * CHECKSUM_FACTOR % 2**64) >> 32
        min_magnitude = float(report[LEAST.value : LEAST.value + 1].view(np.float32)[0])
        masked = self._masked if masks else None
        return AccumulateResult(True, True, int(report[NOTED.value]), None), DeviceSentRecord(
            self.wire.capacity, min_magnitude, self._host_positions, self._positions, self._values, masked
        )


def _places(taking: BucketPass, state: State) -> list[int]:
    """Where everything lies that a step's kernels are given and the sender does not keep itself."""
    vectors = (state.v, state.u, taking.positions, taking.counts)
    return [0 if x is None else x.data_ptr() for x in vectors]
