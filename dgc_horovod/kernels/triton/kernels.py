"""The kernels in Triton for CUDA tensors; in tests also for torch CPU tensors, under Triton's interpreter.

The pass, an exact selection from the bucket and the encoder run one after another on the device (`sender`); decoding
and aggregation do too (`receiver`). Other rules and rare paths use the same pass and `torch_eager`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton

from dgc_horovod.kernels.contract import CHUNK, COMPILED_VALUES, AccumulateResult, Elements, Search, State
from dgc_horovod.kernels.reference import ListedGradients, ListedOutputs, pairwise, sum_stride
from dgc_horovod.kernels.torch_eager import TorchEagerKernels
from dgc_horovod.kernels.triton.accumulate import MATRIX_ROWS, chunk_sums, measure_rows
from dgc_horovod.kernels.triton.memory import EXACT, Fence, addresses, check_that_it_runs, using
from dgc_horovod.kernels.triton.receiver import Filler, TritonReceiver
from dgc_horovod.kernels.triton.sender import REPORT, TritonGradients, TritonSender
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import Coder, PacketFormat

_MOST_LOW_BITS = 16
_INDICES = "elias-fano"  # index codec of the device code; the host handles others


class TritonOutputs(ListedOutputs):
    """`contract.Outputs`, and the kernel that fills them with elements that the host has decoded."""

    def __init__(self, bucket: Bucket, kernels: TritonKernels) -> None:
        super().__init__(bucket)
        self.filler = Filler(bucket, kernels.device)


class TritonKernels(TorchEagerKernels):
    """`contract.Kernels` on flat float32 torch tensors of one CUDA device.

    Args:
        device: CUDA device, such as "cuda:0"; "cpu" only with TRITON_INTERPRET=1.
        coder: coder of packets that the host writes and reads; None: NumPy's.

    Raises:
        BackendUnavailable: Triton cannot run kernels on the device.
    """

    name = "triton"

    def __init__(self, device: torch.device | str, coder: Coder | None = None) -> None:
        super().__init__(device)
        if coder is not None:
            self.coder = coder
        check_that_it_runs(self.device)
        self._fence = Fence(self.device)

    def gradients(self, bucket: Bucket) -> TritonGradients:
        return TritonGradients(bucket, self)

    def accumulate(self, gradients: ListedGradients, state: State, scale: float, search: Search) -> AccumulateResult:
        assert isinstance(gradients, TritonGradients)
        if not gradients.alike:
            return super().accumulate(gradients, state, scale, search)
        board = gradients.board
        gradients.make_room(search.max_candidates)
        board.zero_()
        form = gradients.prepare(scale, search.threshold)
        with using(self.device):
            gradients.settings.send()
            gradients.launch(form, state, board[:REPORT], board[REPORT:])
        sums = self.sampled_sums(state.v) if search.wants_sums else None
        report = board[:REPORT].cpu().numpy()
        gradients.arrays = [None] * len(gradients.arrays)
        return gradients.result(report, sums)

    def measure(self, x: torch.Tensor, offset: int, signs: torch.Tensor) -> torch.Tensor:
        """See `contract`. Two launches."""
        x, columns = x.reshape(-1), signs.numel() // 2
        before = offset % columns
        rows = triton.cdiv(before + x.numel(), columns)
        found = torch.empty(2 * rows + columns, device=self.device)
        parts = torch.empty(triton.cdiv(rows, MATRIX_ROWS.value), columns, device=self.device)
        with using(self.device):
            measure_rows[(len(parts),)](
                x, signs, found, parts, offset // columns, before, x.numel(), rows, columns, **EXACT
            )
        torch.sum(parts, 0, out=found[rows : rows + columns])
        return found

    def sums(self, x: torch.Tensor) -> tuple[float, float]:
        total, squares = _sums_of([x])[0].tolist()
        return total, squares

    def squares(self, arrays: Sequence[torch.Tensor]) -> float:
        return sum(_sums_of(arrays)[:, 1].tolist(), 0.0)

    def sampled_sums(self, x: torch.Tensor) -> tuple[float, float]:
        total, squares = _sums_of([x], sum_stride(-(-len(x) // CHUNK)))[0].tolist()
        return total, squares

    def outputs(self, bucket: Bucket) -> TritonOutputs:
        return TritonOutputs(bucket, self)

    def aggregate_into(
        self, outputs: ListedOutputs, contributions: Sequence[Elements], scale: float, fresh: bool
    ) -> bool:
        assert isinstance(outputs, TritonOutputs)
        return outputs.filler.listed(outputs, list(contributions), scale, fresh)

    def sender(self, bucket: Bucket, wire: PacketFormat, max_candidates: int) -> TritonSender | None:
        if wire.values not in COMPILED_VALUES or wire.indices != _INDICES:
            return None
        return TritonSender(bucket, wire, max_candidates, self.device)

    def receiver(self, bucket: Bucket, wire: PacketFormat, ranks: int) -> TritonReceiver | None:
        if wire.values not in COMPILED_VALUES or wire.indices != _INDICES:
            return None
        if wire.low_bits > _MOST_LOW_BITS:  # so few elements that one program would have to zero most of the bucket
            return None
        return TritonReceiver(bucket, wire, ranks, self.device, self._fence)


def _sums_of(tensors: Sequence[torch.Tensor], stride: int = 1) -> np.ndarray:
    """Return sum and sum of squares of each tensor, of every `stride`-th chunk; (tensors, 2) float64. One launch.

    Args:
        tensors: flat float32 tensors on one device.
        stride: distance between two summed chunks, >= 1, see `Kernels.sampled_sums`.
    """
    numels = np.array([len(x) for x in tensors])
    chunks = np.ceil(np.ceil(numels / CHUNK) / stride).astype(np.int64)  # number of summed chunks of each tensor
    ends = np.cumsum(chunks)
    if not ends.size or not ends[-1]:
        return np.zeros((len(tensors), 2))
    vector = np.repeat(np.arange(len(tensors)), chunks)
    begin = (np.arange(ends[-1]) - np.repeat(ends - chunks, chunks)) * CHUNK * stride
    table = np.stack([vector, begin, numels[vector]], axis=1).astype(np.int32)
    device = tensors[0].device
    sums = torch.empty(2 * len(table), dtype=torch.float64, device=device)
    given = torch.from_numpy(table.ravel()).to(device), torch.tensor(addresses(tensors), device=device)
    with using(device):
        chunk_sums[(len(table),)](given[1], given[0], sums, **EXACT)
    parts = np.split(sums.cpu().numpy().reshape(-1, 2), ends[:-1])
    return np.stack([pairwise(part) for part in parts])
