"""The kernel contract: what every backend must do, bit for bit as `reference` does it.

Arithmetic rules, so that backends, instruction sets and thread counts agree exactly:

* float32 state, but for momentum in bfloat16, which is rounded to nearest even where it is written, what is finite to
  what is finite;
* every product is rounded before it is added (no fused multiply-add);
* hyper-parameters are rounded to float32 before use;
* sums are taken in float64 over the fixed tree described in `Kernels.sums`;
* denormals are kept (gradual underflow), never flushed.

An ``Array`` is the backend's own flat float32 vector (NumPy array, torch tensor). Positions and the values at them
cross the contract as NumPy arrays on the host (`Elements`): there are only about k of them.
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

    Of a u in bfloat16 what enters v is the sum before it is rounded.

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
        rows, columns: what elements of a row and of a column are multiplied by, >= 0, float32 Arrays of the backend,
            one a row of the tensor and b >= 1. Others may be written into them between two passes.
        bound: the largest magnitude that enters, > 0. Adam's own is ``1/sqrt(1-b2)``, as the present gradient is in
            its second moment.
        offset: index in the tensor of the segment's first element, >= 0.
    """

    rows: Array
    columns: Array
    bound: float
    offset: int = 0


Accumulation = ErrorFeedback | MomentumCorrection | SharedMoment


class Elements(NamedTuple):
    """Some elements of a bucket: ascending int32 positions, and the float32 values there."""

    positions: np.ndarray
    values: np.ndarray


NO_ELEMENTS = Elements(np.empty(0, np.int32), np.empty(0, np.float32))


def joined(parts: Sequence[Elements]) -> Elements:
    """The elements of several ranges, in ascending order, as one."""
    if not parts:
        return NO_ELEMENTS
    if len(parts) == 1:
        return parts[0]
    return Elements(np.concatenate([p.positions for p in parts]), np.concatenate([p.values for p in parts]))


class State:
    """What one rank keeps of a bucket: the residual v, and the momentum u, made at first use.

    All are float32 but u, which may be bfloat16.

    What was sent has left v for whoever looks at it. A backend may put that off until then, or, without `masked`, until
    its next pass over v, which has the elements in the cache: to write a hundredth of them costs a sixth of a pass.

    `remainder` is of the shard that the rank owns, if it owns one: what it was sent and has not sent on.
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
        """Let v be these at their positions, later; of a backend whose Arrays are NumPy's."""
        self.settle()
        self._put_off = elements

    def settle(self) -> None:
        """Do what was put off."""
        v, elements = self.take()
        if elements.values.size:
            v[elements.positions] = elements.values

    def take(self) -> tuple[Array, Elements]:
        """v as it is, and what was put off, for a backend that sees to it now."""
        elements, self._put_off = self._put_off, NO_ELEMENTS
        return self._v, elements


# A run of a bucket from which elements are selected together, as a pass sees it: its threshold, and its sums. The
# layout is that of csrc/dgc.h.
RANGE = np.dtype(
    [
        ("start", np.int64),
        ("numel", np.int64),
        ("sum", np.float64),
        ("squares", np.float64),
        ("threshold", np.float32),  # non-zero elements of at least this magnitude are candidates; infinity: none
        ("unused", np.int32),
    ]
)


class Gradients(Protocol):
    """The gradients of one bucket as they become ready, and how each enters the residual."""

    def put(self, i: int, gradient: Array, accumulation: Accumulation) -> None:
        """Segment i's: a flat float32 Array, which must stay as it is until `Kernels.accumulate`, and is left so."""

    def squared_norm(self) -> float:
        """Sum of the squares of all gradients; what is not finite counts as zero. One read of them."""


class Outputs(Protocol):
    """Where the update of each segment of one bucket is put together."""

    def put(self, i: int, output: Array) -> None:
        """Segment i's: a flat float32 Array, overwritten by `Kernels.aggregate_into`."""

    def clear(self) -> None:
        """Let go of all of them."""


@dataclass(frozen=True)
class AccumulateResult:
    """What a pass over a bucket saw.

    Args:
        gradients_finite, residual_finite: whether all gradients were finite, and whether v is.
        num_candidates: number of elements that reached their range's threshold.
        candidates: elements that reached it, until the next pass over the bucket; None if there was no room for them.
    """

    gradients_finite: bool
    residual_finite: bool
    num_candidates: int
    candidates: Elements | None


class SentRecord(Protocol):
    """What a step sent, for as long as it may have to be taken back."""

    @property
    def count(self) -> int:
        """How many elements."""

    @property
    def min_magnitude(self) -> float:
        """The smallest magnitude among them."""

    @property
    def positions(self) -> np.ndarray:
        """Positions of what was sent, int32, ascending; on the host, for free."""

    @property
    def elements(self) -> Elements:
        """What was sent, as it stood in v; on the host."""

    def rollback(self, state: State) -> None:
        """Let u and v be, bit for bit, as after accumulation."""


class Sender(Protocol):
    """A whole step on a device: pass, exact selection among the bucket, packet, and what is left, with one wait.

    Attributes:
        payload: packet, uint8, on the host, after `send`.
    """

    payload: np.ndarray

    def takes(self, gradients: Any) -> bool:
        """Whether these can go this way; if not, `Kernels.accumulate` takes them."""

    def send(
        self, gradients: Any, state: State, scale: float, candidate_threshold: float, step: int, masks: bool
    ) -> tuple[AccumulateResult, SentRecord | None]:
        """Take in the gradients and send the largest elements of the bucket.

        Args:
            gradients, state, scale: see `Kernels.accumulate`.
            candidate_threshold: smallest magnitude that makes a candidate, > 0 and finite.
            step: schedule step, >= 0, for the packet's header.
            masks: whether ``u = 0`` where something is sent (DGC 3.2).

        Returns:
            What was seen, and what was sent; None where the candidates do not hold it, or a gradient is not finite, or
            a value would be read as zero. Then only the pass has been made, and the host selects as after `accumulate`.
        """


class Receiver(Protocol):
    """All ranks' packets of a bucket, decoded and added on a device."""

    def read(self, packets: np.ndarray, counts: np.ndarray) -> None:
        """Begin to decode packets whose headers have been checked.

        Args:
            packets: packets of all ranks, (ranks, nbytes) uint8.
            counts: number of elements in each, (ranks,) int64.
        """

    def aggregate_into(self, outputs: Any, scale: float) -> bool:
        """As `Kernels.aggregate_into`, of what was read, from zero. It counts only if there are no `problems`."""

    @property
    def problems(self) -> dict[int, str]:
        """What is wrong with which ranks' packets; asked before `aggregate_into`, it waits for the device."""

    @property
    def contributions(self) -> list[Elements]:
        """What each rank sent; copies on the host."""


class Kernels(Protocol):
    """One backend on one device. All methods that change an array change it in place."""

    name: str
    array_kind: str  # "numpy" or "torch": what an Array is; those of torch also have from_dlpack and to_dlpack
    takes_tensors: bool  # whether gradients and outputs may be torch tensors too: contiguous, on the host, of any shape
    coder: Coder

    # -- arrays

    def new(self, numel: int, dtype: str = "fp32") -> Array:
        """A zero vector of `numel` "fp32" or "bf16" numbers."""

    def to_host(self, x: Array) -> np.ndarray:
        """`x` as a float32 NumPy array; a view where that is what the memory of the host has."""

    def from_host(self, values: np.ndarray) -> Array:
        """A host float32 vector as an Array; a view where the memory is the host's."""

    def write(self, x: Array, values: np.ndarray) -> None:
        """``x = values``, float32 of the host, rounded where x is bfloat16 (see above)."""

    def fill_zero(self, x: Array) -> None:
        """``x = 0``."""

    def take(self, x: Array, positions: np.ndarray) -> np.ndarray:
        """The float32 values at `positions`, on the host."""

    def put(self, x: Array, elements: Elements) -> None:
        """``x[positions] = values``."""

    # -- the pass over a bucket

    def gradients(self, bucket: Bucket) -> Gradients:
        """An empty set of gradients for `bucket`."""

    def accumulate(
        self, gradients: Any, state: State, scale: float, ranges: np.ndarray, max_candidates: int, want_sums: bool
    ) -> AccumulateResult:
        """Add ``scale * gradient`` of every segment to u and v as its feed says; look at v on the way.

        What is not finite in a gradient enters as 0.

        Args:
            gradients: gradients of this backend, one of each segment; let go of afterwards.
            state: v, and u where a feed needs it.
            scale: factor of the gradients, > 0.
            ranges: RANGE records of the bucket, in ascending order.
            max_candidates: largest number of candidates wanted, >= 0.
            want_sums: whether to fill in the ranges' sum and squares (see `sampled_sums`).

        Cost: one pass. With momentum it reads g, u, v and writes u, v: 20 bytes an element, 16 where u is bfloat16;
        without 12, also with a shared second moment. What is written is in the cache already, and so takes little time.
        """

    # -- looking at v

    def sums(self, x: Array) -> tuple[float, float]:
        """Sum and sum of squares of `x` in float64, in one fixed order; what is not finite counts as zero.

        x is cut into chunks of 4,096 (the last one filled with zeros), a chunk into 256 rows of 16
        lanes. Neighbouring rows are added pairwise until one is left, then the upper half of the lanes
        is added to the lower until one is left; the chunks' sums are added pairwise, neighbours first,
        an odd last one with zero. Squares of float32 are exact in float64 and cannot overflow. One read of x.
        """

    def squares(self, arrays: Sequence[Array]) -> float:
        """The sums of squares of `sums`, of several vectors, added in their order."""

    def measure(self, x: Array, offset: int, signs: Array) -> Array:
        """Sums of squares of a run of a matrix by row and by column, and the product of each row with random signs.

        Args:
            x: elements `offset` and next of the matrix, in the order of rows; as a gradient, see `takes_tensors`.
            offset: index of the first of them, >= 0.
            signs: random signs, (2*b,) float32, for b columns: those of row r begin at `first_sign` of it.

        Returns:
            Of the rows that x touches, of all columns, of those rows: one float32 vector, in an own order of addition.
        """

    def sampled_sums(self, x: Array) -> tuple[float, float]:
        """`sums` of every `sum_stride`-th chunk of x: a first guess needs no more."""

    def count_at_least(self, x: Array, threshold: float) -> int:
        """How many elements have ``|x| >= threshold``. One read of x."""

    def at_least(self, x: Array, threshold: float) -> Elements:
        """The non-zero elements with ``|x| >= threshold``. One read of x."""

    def top_k(self, x: Array, k: int) -> Elements:
        """The k largest ``|x|``; ties go to the lower position; zeros never. Reads x several times."""

    def sample(self, x: Array, start: int, stride: int) -> np.ndarray:
        """Magnitudes of ``x[start::stride]``, on the host."""

    # -- among few elements, on the host

    def keep_largest(self, elements: Elements, k: int) -> Elements:
        """As `top_k`, among `elements`, whose memory is used for the result."""

    def keep_at_least(self, elements: Elements, threshold: float) -> Elements:
        """As `at_least`, among `elements`, whose memory is used for the result."""

    def kth_largest(self, values: np.ndarray, k: int) -> float:
        """The k-th largest magnitude of host values, 1 <= k <= size."""

    # -- what was sent leaves, what came back is added

    def update_residual(self, state: State, elements: Elements, decoded: np.ndarray, masked: np.ndarray | None) -> None:
        """``v = values - decoded`` at the positions; with `masked`, u's values go there and ``u = 0`` (DGC 3.2)."""

    def outputs(self, bucket: Bucket) -> Outputs:
        """An empty set of outputs for `bucket`."""

    def aggregate_into(self, outputs: Any, contributions: Sequence[Elements], scale: float, fresh: bool) -> bool:
        """``update = sum over contributions of values * fp32(scale)``, added in their order.

        Args:
            outputs: outputs of this backend, one for each segment.
            contributions: elements that each rank sent, in rank order.
            scale: factor of the sum: 1/N for the mean, 1 for the sum, times the loss scale.
            fresh: whether to begin with zero; if not, the sum is added to what is there.

        Returns:
            Whether every element is finite.

        Cost: one write of the outputs, and N*k additions.
        """

    def aggregate_dense(self, outputs: Any, summed: Array, scale: float) -> bool:
        """``update = summed * fp32(scale)``; returns whether every element is finite."""

    # -- the same without the host in between, where there is a device for it

    def sender(self, bucket: Bucket, wire: PacketFormat, max_candidates: int) -> Sender | None:
        """What sends the ``wire.capacity`` largest, from at most `max_candidates` candidates; None: the host does."""

    def receiver(self, bucket: Bucket, wire: PacketFormat, ranks: int) -> Receiver | None:
        """What reads packets of that form; None: the host does."""
