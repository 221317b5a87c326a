"""The kernels as torch operations: any device that torch knows, all its threads, no compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dgc_horovod.kernels.contract import CHUNK, LANES, Elements
from dgc_horovod.kernels.reference import ComposedKernels, first_sign

_SUM_BLOCK = 256 * CHUNK  # elements widened to float64 at a time: bounds the temporary at 8 MiB
_PINNED = 1 << 20  # bytes; larger vectors are not copied through pinned memory, which torch keeps


def _scaled(g: torch.Tensor, scale: float) -> torch.Tensor:
    return g if scale == 1.0 else g * scale


def _chunk_sums(x: torch.Tensor) -> torch.Tensor:
    """Return one float64 sum for each chunk of `x`, in the order that `Kernels.sums` defines."""
    rows = torch.nn.functional.pad(x, (0, -x.numel() % CHUNK)).view(-1, CHUNK // LANES, LANES)
    while rows.shape[1] > 1:
        rows = rows[:, 0::2] + rows[:, 1::2]
    lanes = rows[:, 0]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _on_host(positions: torch.Tensor) -> np.ndarray:
    return positions.to("cpu", torch.int32).numpy()


def _pairwise(sums: torch.Tensor) -> float:
    while sums.numel() > 1:
        sums = torch.nn.functional.pad(sums, (0, sums.numel() % 2))
        sums = sums[0::2] + sums[1::2]
    return float(sums[0]) if sums.numel() else 0.0


class TorchEagerKernels(ComposedKernels):
    """`contract.Kernels` on flat float32 torch tensors of one device."""

    name = "torch_eager"
    array_kind = "torch"
    takes_tensors = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def new(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, device=self.device)

    def from_dlpack(self, capsule: object) -> torch.Tensor:
        """Convert another framework's vector on this device to an Array in the same memory."""
        if self.device.type == "cuda":  # torch's stream does not wait for the stream that writes the vector
            torch.cuda.synchronize(self.device)
        return torch.from_dlpack(capsule)

    def to_dlpack(self, x: torch.Tensor) -> Any:
        """Return `x` as a capsule with the same memory, after all writes to it are done."""
        if x.is_cuda:  # the consumer's stream does not wait for torch's stream
            torch.cuda.current_stream(x.device).synchronize()
        return torch.utils.dlpack.to_dlpack(x)

    def all_finite(self, x: torch.Tensor) -> bool:
        if x.numel() == 0:
            return True
        low, high = torch.aminmax(x)  # one pass; NaN propagates
        return bool(torch.isfinite(low) & torch.isfinite(high))

    def zero_unless_finite(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.isfinite(x), x, 0.0)

    def chunks(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        return torch.cat([x[start : start + CHUNK] for start in range(0, x.numel(), CHUNK * stride)])

    def sums(self, x: torch.Tensor) -> tuple[float, float]:
        first, second = [], []
        for start in range(0, x.numel(), _SUM_BLOCK):
            wide = self.zero_unless_finite(x[start : start + _SUM_BLOCK]).double()
            first.append(_chunk_sums(wide))
            second.append(_chunk_sums(wide * wide))
        if not first:
            return 0.0, 0.0
        return _pairwise(torch.cat(first)), _pairwise(torch.cat(second))

    def accumulate_residual(self, v: torch.Tensor, g: torch.Tensor, scale: float) -> None:
        v.add_(_scaled(g, scale))

    def accumulate_momentum(
        self, u: torch.Tensor, v: torch.Tensor, g: torch.Tensor, scale: float, momentum: float, nesterov: bool
    ) -> None:
        g = _scaled(g, scale)
        # mul_ then add_, never add_(alpha=), which fuses them and differs in a quarter of the elements
        u.mul_(momentum).add_(g)
        if nesterov:
            v.add_(g).add_(u * momentum)
        else:
            v.add_(u)

    def spread(self, x: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        return x[torch.from_numpy(index).to(self.device)]

    def accumulate_shared(
        self, v: torch.Tensor, g: torch.Tensor, scale: float, rows: torch.Tensor, columns: torch.Tensor, bound: float
    ) -> None:
        v.add_((_scaled(g, scale) * rows).mul_(columns).clamp_(-bound, bound))

    def measure(self, x: torch.Tensor, offset: int, signs: torch.Tensor) -> torch.Tensor:
        b = signs.numel() // 2
        before = offset % b
        matrix = x.reshape(-1)
        if before or x.numel() % b:
            matrix = torch.nn.functional.pad(matrix, (before, -(before + x.numel()) % b))
        matrix = matrix.view(-1, b)
        first = first_sign(torch.arange(len(matrix), device=x.device) + offset // b, b)
        square, products = matrix.square(), matrix * signs.unfold(0, b, 1)[first]
        return torch.cat([square.sum(1), square.sum(0), products.sum(1)])

    def count_at_least(self, x: torch.Tensor, threshold: float) -> int:
        return int(torch.count_nonzero(x.abs() >= threshold))

    def positions_at_least(self, x: torch.Tensor, threshold: float) -> np.ndarray:
        mask = (x.abs() >= threshold).logical_and_(x != 0)
        return _on_host(mask.nonzero().view(-1))

    def top_positions(self, x: torch.Tensor, k: int) -> np.ndarray:
        if k >= int(torch.count_nonzero(x)):
            return _on_host(x.nonzero().view(-1))
        size = x.abs()
        kth = torch.topk(size, k, sorted=False).values.min()
        above = (size > kth).nonzero().view(-1)
        ties = (size == kth).nonzero().view(-1)[: k - above.numel()]
        return _on_host(torch.cat([above, ties]).sort().values)

    def sample(self, x: torch.Tensor, start: int, stride: int) -> np.ndarray:
        return x[start::stride].abs().cpu().numpy()

    def take(self, x: torch.Tensor, positions: np.ndarray) -> np.ndarray:
        return x[self._index(positions)].cpu().numpy()

    def put(self, x: torch.Tensor, elements: Elements) -> None:
        x[self._index(elements.positions)] = torch.from_numpy(elements.values).to(self.device)

    def add_at(self, x: torch.Tensor, positions: np.ndarray, values: np.ndarray) -> None:
        index = self._index(positions)
        x[index] = x[index] + torch.as_tensor(values, device=self.device)

    def _index(self, positions: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(positions).to(self.device, torch.int64)

    def fill_zero(self, x: torch.Tensor) -> None:
        x.zero_()

    def copy_scaled(self, x: torch.Tensor, source: torch.Tensor, scale: float) -> None:
        torch.mul(source, scale, out=x)

    def to_host(self, x: torch.Tensor) -> np.ndarray:
        return x.cpu().numpy()

    def fetch(self, arrays: Sequence[torch.Tensor]) -> list[np.ndarray]:
        if not arrays:
            return []
        ends = np.cumsum([x.numel() for x in arrays])
        return np.split(self.to_host(torch.cat(list(arrays))), ends[:-1])

    def write(self, x: torch.Tensor, values: np.ndarray) -> None:
        x.copy_(self.from_host(values))

    def from_host(self, values: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(values)
        if self.device.type != "cuda" or values.nbytes > _PINNED:
            return host.to(self.device)
        # a copy of other memory waits for all work of the stream, such as a backward pass
        return host.pin_memory().to(self.device, non_blocking=True)
