"""The kernel contract, which every backend implements with the same bits as `reference`.

Arithmetic rules, so that backends, instruction sets and thread counts agree exactly:

* float32 state;
* every product is rounded before it is added (no fused multiply-add);
* hyper-parameters are rounded to float32 before use;
* sums are taken in float64 over the fixed tree described in `Kernels.sums`;
* denormals are kept (gradual underflow), never flushed.

An ``Array`` is the backend's own flat float32 vector (NumPy array, torch tensor). Positions and their values are passed
as NumPy arrays on the host (`Elements`), as there are only about k of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import Coder, PacketFormat

Array = Any

CHUNK = 4096
LANES = 16
COMPILED_VALUES = frozenset(("fp32", "fp16", "bf16", "8bit", "4bit", "2bit"))  # value codecs of C++ and Triton


@dataclass(frozen=True)
class ErrorFeedback:
    """The gradient itself enters the residual: ``v += g`` (TopK-SGD)."""


@dataclass(frozen=True)
class MomentumCorrection:
    """The momentum enters the residual (DGC 3.1): ``u = m*u + g; v += u``, Nesterov ``v += g; v += m*u``.

    Args:
        momentum: m in [0, 1), read from the parameter group at every step.
        nesterov: whether Nesterov's form is used.
    """

    momentum: float
    nesterov: bool = False


@dataclass(frozen=True, eq=False)
class SharedMoment:
    """The gradient over the root of a factored second moment enters the residual (Adafactor, arXiv 1804.04235).

    ``d = ((scale*g) * rows[p // b]) * columns[p % b];  v += min(max(d, -bound), bound)`` for the element at index p of
    a tensor, seen as a matrix of b columns.

    Args:
        rows, columns: factors of the rows and of the columns, >= 0, float32 Arrays of the backend, one for each row of
            the tensor and b >= 1. They may be changed between two passes.
        bound: the largest magnitude that enters, > 0. Adam's own is ``1/sqrt(1-b2)``, as its second moment includes
            the present gradient.
        offset: index in the tensor of the segment's first element, >= 0.
    """

    rows: Array
    columns: Array
    bound: float
    offset: int = 0


Accumulation = ErrorFeedback | MomentumCorrection | SharedMoment


class Elements(NamedTuple):
    """Elements of a bucket: ascending int32 positions, and the float32 values at them."""

    positions: np.ndarray
    values: np.ndarray


NO_ELEMENTS = Elements(np.empty(0, np.int32), np.empty(0, np.float32))


class State:
    """The state of a bucket on one rank: the residual v, and the momentum u, allocated at first use.

    All arrays are float32.

    Reading `v` gives the residual after sending. A backend may defer that write until v is read, or, without `masked`,
    until its next pass over v, with the elements in the cache: writing a hundredth of them costs a sixth of a pass.

    `remainder` is that of a shard owner: the sums of received elements that it has not sent on yet.
    """

    def __init__(self, v: Array, u: Array | None = None, remainder: Array | None = None) -> None:
        self._v, self.u, self.remainder = v, u, remainder
        self._put_off = NO_ELEMENTS

    @property
    def v(self) -> Array:
        """The residual."""
        self.settle()
        return self._v

    def put_off(self, elements: Elements) -> None:
        """Defer the write of `elements` to v; for backends with NumPy Arrays."""
        self.settle()
        self._put_off = elements

    def settle(self) -> None:
        """Make the deferred write."""
        v, elements = self.take()
        if elements.values.size:
            v[elements.positions] = elements.values

    def take(self) -> tuple[Array, Elements]:
        """Return v and the deferred elements, for a backend that writes them itself."""
        elements, self._put_off = self._put_off, NO_ELEMENTS
        return self._v, elements


class Search(NamedTuple):
    """What a pass over a bucket looks for.

    Args:
        threshold: non-zero elements of at least this magnitude, a float32, are candidates; infinity: none.
        max_candidates: largest number of candidates wanted, >= 0.
        wants_sums: whether to compute `Kernels.sampled_sums`.
    """

    threshold: float
    max_candidates: int
    wants_sums: bool


class Gradients(Protocol):
    """The gradients of one bucket, and how each enters the residual."""

    def put(self, i: int, gradient: Array, accumulation: Accumulation) -> None:
        """Set segment i's gradient: a flat float32 Array, which must not change before `Kernels.accumulate`."""

    def squared_norm(self) -> float:
        """Return the sum of squares of all gradients; elements that are not finite count as zero. One read of them."""


class Outputs(Protocol):
    """The arrays that the update of each segment of one bucket is written to."""

    def put(self, i: int, output: Array) -> None:
        """Set segment i's array: a flat float32 Array, overwritten by `Kernels.aggregate_into`."""

    def clear(self) -> None:
        """Release all arrays."""


@dataclass(frozen=True)
class AccumulateResult:
    """The result of a pass over a bucket.

    Args:
        gradients_finite, residual_finite: whether all gradients are finite, and whether v is.
        num_candidates: number of elements that reached the threshold.
        candidates: these elements, valid until the next pass over the bucket; None if they exceeded the capacity.
        sums: `Kernels.sampled_sums` of v, if they were wanted.
    """

    gradients_finite: bool
    residual_finite: bool
    num_candidates: int
    candidates: Elements | None
    sums: tuple[float, float] | None = None


class SentRecord(Protocol):
    """The elements that a step sent, for a rollback."""

    @property
    def positions(self) -> np.ndarray:
        """Positions of the elements, int32, ascending; already on the host."""

    @property
    def elements(self) -> Elements:
        """The elements with their values in v before sending; on the host."""

    def rollback(self, state: State) -> None:
        """Restore u and v, bit for bit, as after accumulation."""


class Sender(Protocol):
    """A whole step on a device: pass, exact selection from the bucket, packet, and update of v.

    Attributes:
        payload, min_magnitude: packet, uint8, on the host, and the smallest magnitude in it, after `finish`.
        ready: whether `finish` would return at once.
    """

    payload: np.ndarray
    min_magnitude: float

    @property
    def ready(self) -> bool: ...

    def takes(self, gradients: Any) -> bool:
        """Return whether `start` supports these gradients; if not, call `Kernels.accumulate`."""

    def start(self, gradients: Any, state: State, scale: float, threshold: float, step: int, masks: bool) -> None:
        """Launch a step, without a wait: accumulate the gradients and send the largest elements of the bucket.

        Args:
            gradients, state, scale: see `Kernels.accumulate`.
            threshold: smallest magnitude that makes a candidate, > 0 and finite.
            step: schedule step, >= 0, for the packet's header.
            masks: whether ``u = 0`` at sent elements (DGC 3.2).
        """

    def finish(self) -> tuple[AccumulateResult, SentRecord | None]:
        """Wait for the step of `start`, and for nothing that was launched after it.

        Returns:
            The result of the pass, and the sent elements; None if candidates are too few or too many, a gradient is not
            finite, or a value is rounded to zero: only the pass was made, and the host selects as after `accumulate`.
        """


class Receiver(Protocol):
    """All ranks' packets of a bucket, checked, decoded and added on a device.

    Attributes:
        flags, refused: after `settle`, flags of all packets, and the ranks whose packets are invalid.
    """

    flags: np.ndarray
    refused: list[int]

    def aggregate_into(self, packets: np.ndarray, step: int, outputs: Any, scale: float) -> None:
        """Start `Kernels.aggregate_into` with `fresh`; `packets`, (ranks, nbytes) uint8, must be of step `step`."""

    def settle(self) -> bool:
        """Wait; return whether every element is finite. The outputs are valid only if none is `refused`."""

    @property
    def contributions(self) -> list[Elements]:
        """Copies, on the host, of the elements that each rank sent."""


class Kernels(Protocol):
    """One backend on one device. Methods change an array in place. By default it makes no whole steps."""

    name: str
    array_kind: str  # type of an Array, "numpy" or "torch"; torch backends also have from_dlpack and to_dlpack
    takes_tensors: bool  # whether gradients and outputs may be contiguous torch tensors of any shape on the host
    coder: Coder

    # -- arrays

    def new(self, numel: int) -> Array:
        """Return a float32 vector of `numel` zeros."""

    def to_host(self, x: Array) -> np.ndarray:
        """Return `x` as a float32 NumPy array; a view if x is on the host."""

    def fetch(self, arrays: Sequence[Array]) -> list[np.ndarray]:
        """Return `to_host` of several vectors, with one wait for a device."""

    def from_host(self, values: np.ndarray) -> Array:
        """Return a float32 host vector as an Array; a view if Arrays are on the host."""

    def write(self, x: Array, values: np.ndarray) -> None:
        """``x = values``, from float32 on the host."""

    def fill_zero(self, x: Array) -> None:
        """``x = 0``."""

    def take(self, x: Array, positions: np.ndarray) -> np.ndarray:
        """Return the float32 values at `positions`, on the host."""

    def put(self, x: Array, elements: Elements) -> None:
        """``x[positions] = values``."""

    # -- the pass over a bucket

    def gradients(self, bucket: Bucket) -> Gradients:
        """Return an empty set of gradients for `bucket`."""

    def accumulate(self, gradients: Any, state: State, scale: float, search: Search) -> AccumulateResult:
        """Add ``scale * gradient`` of every segment to u and v by its accumulation, and collect candidates of v.

        Elements of a gradient that are not finite enter as 0.

        Args:
            gradients: gradients of this backend, one for each segment; released afterwards.
            state: v, and u if an accumulation needs it.
            scale: factor of the gradients, > 0.
            search: what to look for in v.

        Cost: one pass. With momentum it reads g, u, v and writes u, v: 20 bytes an element;
        without 12, also with a shared second moment. Writes are to elements in the cache, and take little time.
        """

    # -- reading v

    def sums(self, x: Array) -> tuple[float, float]:
        """Return sum and sum of squares of `x` in float64, in one fixed order; not finite elements count as zero.

        x is cut into chunks of 4,096 (the last one filled with zeros), a chunk into 256 rows of 16 lanes. Neighbouring
        rows are added pairwise until one is left, then the upper half of the lanes is added to the lower until one is
        left; the chunks' sums are added pairwise, neighbours first, an odd last one with zero. Squares of float32 are
        exact in float64 and cannot overflow. One read of x.
        """

    def squares(self, arrays: Sequence[Array]) -> float:
        """Return the sums of squares of `sums`, of several vectors, added in their order."""
        return sum((self.sums(x)[1] for x in arrays), 0.0)

    def measure(self, x: Array, offset: int, signs: Array) -> Array:
        """Return sums of squares of a part of a matrix by row and column, and products of its rows with random signs.

        Args:
            x: elements of the matrix from index `offset` on, row by row; may be a tensor, see `takes_tensors`.
            offset: index of the first element, >= 0.
            signs: random signs, (2*b,) float32, for b columns: those of row r begin at ``first_sign(r, b)``.

        Returns:
            One float32 vector: squares of the rows of x, squares of all columns, products of the rows of x; the order
            of additions may differ between backends.
        """

    def sampled_sums(self, x: Array) -> tuple[float, float]:
        """Return `sums` of every `sum_stride`-th chunk of x, for a first guess."""

    def count_at_least(self, x: Array, threshold: float) -> int:
        """Count the elements with ``|x| >= threshold``. One read of x."""

    def at_least(self, x: Array, threshold: float) -> Elements:
        """Return the non-zero elements with ``|x| >= threshold``. One read of x."""

    def top_k(self, x: Array, k: int) -> Elements:
        """Return the k largest ``|x|``; ties go to the lower position; zeros never. Reads x several times."""

    def sample(self, x: Array, start: int, stride: int) -> np.ndarray:
        """Return the magnitudes of ``x[start::stride]``, on the host."""

    # -- few elements, on the host

    def keep_largest(self, elements: Elements, k: int) -> Elements:
        """As `top_k`, for `elements`, whose memory is used for the result."""

    def keep_at_least(self, elements: Elements, threshold: float) -> Elements:
        """As `at_least`, for `elements`, whose memory is used for the result."""

    def kth_largest(self, values: np.ndarray, k: int) -> float:
        """Return the k-th largest magnitude of host values, 1 <= k <= size."""

    # -- update of the residual, aggregation

    def update_residual(self, state: State, elements: Elements, decoded: np.ndarray, masked: np.ndarray | None) -> None:
        """``v = values - decoded`` at the positions; with `masked`, ``masked = u`` and ``u = 0`` there (DGC 3.2)."""

    def outputs(self, bucket: Bucket) -> Outputs:
        """Return an empty set of outputs for `bucket`."""

    def aggregate_into(self, outputs: Any, contributions: Sequence[Elements], scale: float, fresh: bool) -> bool:
        """``update = sum over contributions of values * fp32(scale)``, added in their order.

        Args:
            outputs: outputs of this backend, one for each segment.
            contributions: elements that each rank sent, in rank order.
            scale: factor of the sum: 1/N for the mean, 1 for the sum, times the loss scale.
            fresh: whether outputs start from zero; if not, the sum is added to them.

        Returns:
            Whether every element is finite.

        Cost: one write of the outputs, and N*k additions.
        """

    def aggregate_dense(self, outputs: Any, summed: Array, scale: float) -> bool:
        """``update = summed * fp32(scale)``; return whether every element is finite."""

    # -- whole steps on a device

    def sender(self, bucket: Bucket, wire: PacketFormat, max_candidates: int) -> Sender | None:
        """Return a Sender of the ``wire.capacity`` largest of up to `max_candidates` candidates; None: use the host."""
        return None

    def receiver(self, bucket: Bucket, wire: PacketFormat, ranks: int) -> Receiver | None:
        """Return a Receiver of packets of the format `wire`; None: use the host."""
        return None
