"""A step of compression on the device, launched without a wait: pass, exact selection, packet, update of u and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from dgc_horovod.kernels.contract import AccumulateResult, Elements, MomentumCorrection, SharedMoment, State
from dgc_horovod.kernels.reference import ListedGradients
from dgc_horovod.kernels.torch_eager import TorchEagerKernels
from dgc_horovod.kernels.triton.accumulate import (
    BAD_GRADIENT,
    BAD_RESIDUAL,
    BINS,
    BLOCK,
    BOUND,
    FACTORS,
    FLAGS,
    LEAST,
    MOMENTUM,
    MOMENTUM_FEED,
    NESTEROV_FEED,
    NOTED,
    READY,
    RESIDUAL_FEED,
    SCALE,
    SHARED_FEED,
    WARPS,
    ZEROS,
    accumulate,
)
from dgc_horovod.kernels.triton.encode import (
    CHECKSUM,
    CODED,
    FINE_BINS,
    GROUP,
    HEADER_WORDS,
    LIST_BLOCK,
    SUMMED,
    count,
    encode,
    gather,
    refine,
    update_residual,
)
from dgc_horovod.kernels.triton.memory import (
    EXACT,
    Arrival,
    BucketMap,
    Recorded,
    Upload,
    addresses,
    on_host,
    using,
    value_words,
)
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs import VALUE_CODECS
from dgc_horovod.wire.packet import CHECKSUM_FACTOR, CHECKSUM_WORD, PacketFormat

REPORT, HISTOGRAM = 16, BINS.value  # int32 words
_NUMBERS = 16


class Form(NamedTuple):
    """The form of `accumulate` of a step: kind of accumulation, and whether segments are aligned."""

    feed: int
    aligned: bool


class TritonGradients(ListedGradients):
    """`contract.Gradients`, and the pass that accumulates them, with its memory."""

    def __init__(self, bucket: Bucket, kernels: TorchEagerKernels) -> None:
        super().__init__(bucket, kernels)
        self.device = device = kernels.device
        self.map = BucketMap(bucket, BLOCK.value, device)
        segments = len(bucket.segments)
        self.settings = Upload(
            device,
            {
                "gradients": (torch.int64, segments),
                "factors": (torch.int64, FACTORS.value * segments),
                "threshold": (torch.float32, 1),
                "numbers": (torch.float32, _NUMBERS),
                "header": (torch.int32, HEADER_WORDS.value),  # of the packet, if one is written
            },
        )
        self.bases, self.counts = (torch.empty(self.map.blocks, dtype=torch.int32, device=device) for _ in range(2))
        self.board = torch.zeros(REPORT + HISTOGRAM, dtype=torch.int32, device=device)  # of a step that the host makes
        self.max_candidates = -1
        self.make_room(0)

    def make_room(self, max_candidates: int) -> None:
        """Allocate memory for `max_candidates` candidates."""
        if max_candidates != self.max_candidates:
            self.max_candidates = max_candidates
            self.positions = torch.empty(max(max_candidates, 1), dtype=torch.int32, device=self.device)
            self.values = torch.empty(max(max_candidates, 1), dtype=torch.float32, device=self.device)

    @property
    def alike(self) -> bool:
        """Whether all gradients enter the residual in the same way, as one pass needs."""
        how: list[Any] = [each.bound if isinstance(each, SharedMoment) else each for each in self.accumulations]
        return how.count(how[0]) == len(how)

    def prepare(self, scale: float, threshold: float) -> Form:
        """Write the step's addresses, threshold and numbers to `settings`, still to be sent; gradients are `alike`.

        Args:
            scale: see `Kernels.accumulate`.
            threshold: smallest magnitude that makes a candidate; infinity: none.
        """
        host, feed, how = self.settings.host, RESIDUAL_FEED, self.accumulations[0]
        host["gradients"][:] = addresses(self.arrays)
        host["threshold"][:] = threshold
        host["numbers"][SCALE.value] = scale
        if isinstance(how, MomentumCorrection) and how.momentum:
            feed = NESTEROV_FEED if how.nesterov else MOMENTUM_FEED
            host["numbers"][MOMENTUM.value] = how.momentum
        elif isinstance(how, SharedMoment):
            feed, every = SHARED_FEED, [each for each in self.accumulations if isinstance(each, SharedMoment)]
            host["numbers"][BOUND.value] = how.bound
            host["factors"][:] = np.ravel(
                [(each.rows.data_ptr(), each.columns.data_ptr(), len(each.columns), each.offset) for each in every]
            )
        aligned = self.map.aligned and not (host["gradients"] % 16).any()
        return Form(feed.value, aligned)

    def launch(self, form: Form, state: State, report: torch.Tensor, histogram: torch.Tensor) -> None:
        """Start the pass, after `settings` has been sent.

        Args:
            form: from `prepare`.
            state: see `Kernels.accumulate`.
            report, histogram: int32 zeros for the results, of size REPORT and HISTOGRAM.
        """
        u = state.v if state.u is None else state.u
        given = self.settings.device
        accumulate[(self.map.blocks,)](
            state.v, u, given["gradients"], given["factors"], self.map.starts, self.map.spread, given["threshold"],
            given["numbers"], report, self.positions,
            self.values, self.bases, self.counts, histogram, self.bucket.numel, self.max_candidates,
            FEED=form.feed, ALIGNED=form.aligned, num_warps=WARPS,
            **EXACT,
        )  # fmt: skip

    def result(self, report: np.ndarray, sums: tuple[float, float] | None = None) -> AccumulateResult:
        """Return the result of the pass from its report; candidates, fetched here, only if all numbers are finite."""
        flags, count, candidates = int(report[FLAGS.value]), int(report[NOTED.value]), None
        if not flags and count <= self.max_candidates:
            positions, order = torch.sort(self.positions[:count])
            candidates = Elements(positions.cpu().numpy(), self.values[:count][order].cpu().numpy())
        bad_gradient, bad_residual = flags & BAD_GRADIENT.value, flags & BAD_RESIDUAL.value
        return AccumulateResult(not bad_gradient, not bad_residual, count, candidates, sums)


_WORD = 4  # bytes
_ALIGNED = 4  # words; for a smaller alignment kernels are compiled again


@dataclass(frozen=True)
class DeviceSentRecord:
    """`contract.SentRecord` on the device; its memory is reused at the next step."""

    positions: np.ndarray
    device_positions: torch.Tensor
    values: torch.Tensor
    masked: torch.Tensor | None

    @property
    def elements(self) -> Elements:
        """See `contract.SentRecord`; a copy."""
        return Elements(self.positions.copy(), self.values.cpu().numpy().copy())

    def rollback(self, state: State) -> None:
        """See `contract.SentRecord`."""
        at = self.device_positions.long()
        state.v[at] = self.values
        if self.masked is not None:
            assert state.u is not None
            state.u[at] = self.masked


class TritonSender:
    """`contract.Sender` for one bucket and one packet format.

    Its memory on host and device is that of one step: `start` writes it over, so the step before must have ended. It
    has: `start` refuses a step whose predecessor was not finished, and every way to end a step (commit, rollback,
    local steps, join) takes the message first, or finishes in `BucketEngine.rollback`.

    Steps of several buckets may be under way, on several streams: a bucket shares no memory with another. The event
    that `finish` waits for follows everything that its bucket has launched, so the host may then use any stream.

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
        self._board = torch.zeros(starts[-1], dtype=torch.int32, device=device)  # zero at the begin of a step
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
        self.min_magnitude, self._arrival = 0.0, Arrival(device)
        self._under_way: tuple[TritonGradients, bool] | None = None  # of the step that was started, and its `masks`

    def takes(self, gradients: TritonGradients) -> bool:
        """See `contract.Sender`."""
        return gradients.alike

    def start(self, gradients: Any, state: State, scale: float, threshold: float, step: int, masks: bool) -> None:
        """See `contract.Sender`.

        Gradients are released at once: memory that was allocated for the step on this stream is used again in its
        order, and the caller keeps ``p.grad``.
        """
        assert self._under_way is None, "finish comes before the next start"
        gradients.make_room(self.max_candidates)
        self._header["step"] = step % 2**32
        gradients.settings.host["header"][:] = self._header.view(np.int32)
        form = gradients.prepare(scale, threshold)

        def kernels() -> None:
            gradients.settings.send()
            self._board.zero_()
            gradients.launch(form, state, self._report, self._histogram)
            self._select(gradients)
            self._write(gradients.settings.device["header"], state, masks)
            # on this stream: it takes a few microseconds, as long as the events that another one would need
            self._back.copy_(self._board[: self._back.numel()], non_blocking=True)

        others = (
            state.v,
            state.u,
            gradients.positions,
            gradients.counts,
        )  # arguments that are not the sender's own memory
        places = [0 if x is None else x.data_ptr() for x in others]
        with using(self.device):
            self._recorded.launch((form, masks, *places), kernels)
            self._arrival.record()
        gradients.arrays = [None] * len(gradients.arrays)
        self._under_way = gradients, masks

    @property
    def ready(self) -> bool:
        """See `contract.Sender`."""
        return self._arrival.is_there

    def finish(self) -> tuple[AccumulateResult, DeviceSentRecord | None]:
        """See `contract.Sender`."""
        assert self._under_way is not None, "start comes first"
        self._arrival.wait()
        (taken, masks), self._under_way = self._under_way, None
        report = self._back[:REPORT].numpy()
        if not report[READY.value] or report[ZEROS.value]:
            return taken.result(report), None
        total = int(report[CHECKSUM.value : CHECKSUM.value + 2].view(np.uint64)[0])
        self.payload.view(np.uint32)[CHECKSUM_WORD] = (total * CHECKSUM_FACTOR % 2**64) >> 32
        self.min_magnitude = float(report[LEAST.value : LEAST.value + 1].view(np.float32)[0])
        masked = self._masked if masks else None
        sent = DeviceSentRecord(self._host_positions, self._positions, self._values, masked)
        return AccumulateResult(True, True, int(report[NOTED.value]), None), sent

    def _select(self, taken: TritonGradients) -> None:
        k, max_candidates, blocks = self.wire.capacity, taken.max_candidates, taken.map.blocks
        threshold = taken.settings.device["threshold"]
        refine[(triton.cdiv(max_candidates, LIST_BLOCK.value),)](
            taken.values, threshold, self._report, self._histogram, self._fine, k, max_candidates, **EXACT
        )
        per_block = taken.bases, taken.counts, self._larger, self._equal, self._larger_sums, self._equal_sums
        groups = (triton.cdiv(blocks, GROUP.value),)
        count[groups](
            taken.values,
            threshold,
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
            self._positions, self._values, self._decoded, self._masked, state.v, state.u if masks else state.v,
            self._report, self._packet, k, words, MASKS=masks, **EXACT,
        )  # fmt: skip
