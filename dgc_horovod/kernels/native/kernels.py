"""The kernels in C++, for torch CPU tensors and NumPy arrays: one call a bucket, without copies or the GIL."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc_horovod.kernels.contract import (
    CHUNK,
    COMPILED_VALUES,
    NO_ELEMENTS,
    AccumulateResult,
    Array,
    Elements,
    Kernels,
    Search,
    State,
)
from dgc_horovod.kernels.native.library import (
    CONTRIBUTION,
    LAYOUT,
    NO_SEGMENTS,
    NativeGradients,
    NativeOutputs,
    Scratch,
    address,
    load,
    zeros,
)
from dgc_horovod.kernels.reference import NumpyArrays
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.codecs import INDEX_CODECS, VALUE_CODECS
from dgc_horovod.wire.packet import BAD_POSITIONS, BAD_VALUES, CHECKSUM_WORD, Coder, PacketFormat

_BAD_GRADIENT, _BAD_RESIDUAL = 1, 2
_PROBLEMS = ("", BAD_POSITIONS, BAD_VALUES)
_FEW = 8  # elements of the bucket for each sent one, from which a deferred write is worth its copy
_INDICES = frozenset(("elias-fano", "every"))  # index codecs of csrc/codecs.h; NumPy handles others


class NativeCoder:
    """`packet.Coder` in C++."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._layouts: dict[PacketFormat, np.ndarray] = {}

    def _layout(self, wire: PacketFormat) -> int | None:
        layout = self._layouts.get(wire)
        if layout is None:
            codes = INDEX_CODECS[wire.indices].code, VALUE_CODECS[wire.values].code
            record = (wire.numel, wire.capacity, wire.values_at, *codes, wire.low_bits, 0)
            layout = self._layouts[wire] = np.array([record], LAYOUT)
        return address(layout)

    def supports(self, wire: PacketFormat) -> bool:
        return wire.indices in _INDICES and wire.values in COMPILED_VALUES

    def encode(
        self, wire: PacketFormat, positions: np.ndarray, values: np.ndarray, body: np.ndarray, decoded: np.ndarray
    ) -> int:
        layout, count = self._layout(wire), positions.size
        zeros: int = self._library.dgc_encode(
            layout, address(positions), address(values), count, address(body), address(decoded)
        )
        assert zeros >= 0, f"the native coder knows no codec {wire.indices} or {wire.values}"
        return zeros

    def decode(
        self, wire: PacketFormat, body: np.ndarray, count: int, positions: np.ndarray, values: np.ndarray
    ) -> str:
        layout = self._layout(wire)
        return _PROBLEMS[self._library.dgc_decode(layout, address(body), count, address(positions), address(values))]

    def checksum(self, packet: np.ndarray) -> int:
        return self._library.dgc_checksum(address(packet), packet.size // 4, CHECKSUM_WORD)


class NativeKernels(NumpyArrays, Kernels):
    """`contract.Kernels` on NumPy arrays, in C++.

    Args:
        threads: largest number of threads, >= 0; 0: as many as torch uses, one without torch.
        library: compiled library from `library.load`; None: loaded here.
    """

    name = "native"
    takes_tensors = True

    def __init__(self, threads: int = 0, library: Any = None) -> None:
        self._library = library or load()
        self._fixed_threads = threads
        self.coder: Coder = NativeCoder(self._library)

    @property
    def threads(self) -> int:
        """Number of threads that a call may use now."""
        torch = sys.modules.get("torch")
        return self._fixed_threads or (torch.get_num_threads() if torch is not None else 1)

    @property
    def instructions(self) -> str:
        """Instruction set in use: plain, AVX2 or AVX-512."""
        return self._library.dgc_instructions().decode()

    def use_instructions(self, name: str) -> bool:
        """Use instruction set `name` in the whole process; return whether this processor has it."""
        return bool(self._library.dgc_use_instructions(name.encode()))

    # -- arrays

    def new(self, numel: int) -> np.ndarray:
        return zeros(numel)

    def put(self, x: np.ndarray, elements: Elements) -> None:
        self._library.dgc_put(address(x), address(elements.positions), address(elements.values), elements.values.size)

    # -- the pass over a bucket

    def gradients(self, bucket: Bucket) -> NativeGradients:
        return NativeGradients(bucket, self)

    def accumulate(self, gradients: NativeGradients, state: State, scale: float, search: Search) -> AccumulateResult:
        if gradients.scratch is None:
            gradients.scratch = Scratch(gradients.bucket.numel)
        v, left = state.take()
        scratch, what = gradients.scratch, (gradients.table, state.u, scale, left)
        bad = self._library.dgc_pass(*self._arguments(scratch, v, search, *what))
        gradients.arrays = [None] * len(gradients.arrays)
        found = scratch.count, scratch.elements(), scratch.sums if search.wants_sums else None
        return AccumulateResult(not bad & _BAD_GRADIENT, not bad & _BAD_RESIDUAL, *found)

    def _arguments(
        self,
        scratch: Scratch,
        v: np.ndarray,
        search: Search,
        segments: np.ndarray = NO_SEGMENTS,
        u: np.ndarray | None = None,
        scale: float = 1.0,
        left: Elements = NO_ELEMENTS,
    ) -> tuple[Any, ...]:
        """Return the arguments of `dgc_pass`: addresses, whose memory the caller keeps alive."""
        scratch.make_room(search.max_candidates)
        return (
            address(v), v.size, address(u), address(segments), len(segments), scale, search.threshold,
            *map(address, left), left.values.size, search.wants_sums, address(scratch.found), self.threads,
        )  # fmt: skip

    # -- reading v

    def sums(self, x: Array) -> tuple[float, float]:
        numel = x.nbytes // 4  # of a NumPy array or of a tensor
        out, chunk_sums = np.empty(2), np.empty(2 * (numel // CHUNK + 1))
        self._library.dgc_sums(address(x), numel, address(chunk_sums), self.threads, address(out))
        return float(out[0]), float(out[1])

    def measure(self, x: Array, offset: int, signs: np.ndarray) -> np.ndarray:
        numel, b = x.nbytes // 4, signs.size // 2
        rows = -(-(offset % b + numel) // b)
        out = np.zeros(2 * rows + b, np.float32)
        self._library.dgc_measure(address(x), numel, offset, address(signs), b, address(out))
        return out

    def sampled_sums(self, x: np.ndarray) -> tuple[float, float]:
        scratch = Scratch(x.size)
        self._library.dgc_pass(*self._arguments(scratch, x, Search(np.inf, 0, True)))
        return scratch.sums

    def count_at_least(self, x: np.ndarray, threshold: float) -> int:
        return self._library.dgc_count_at_least(address(x), x.size, threshold, self.threads)

    def at_least(self, x: np.ndarray, threshold: float) -> Elements:
        scratch = Scratch(x.size)
        room = min(x.size, x.size // 16 + CHUNK)
        self._library.dgc_pass(*self._arguments(scratch, x, Search(threshold, room, False)))
        if scratch.elements() is None:
            self._library.dgc_pass(*self._arguments(scratch, x, Search(threshold, scratch.count, False)))
        found = scratch.elements()
        assert found is not None
        return found

    def top_k(self, x: np.ndarray, k: int) -> Elements:
        room = max(0, min(k, x.size))
        into = Elements(np.empty(room + 1, np.int32), np.empty(room + 1, np.float32))
        return self._kept(into, self._library.dgc_keep_largest(None, address(x), x.size, k, *map(address, into)))

    # -- few elements

    @staticmethod
    def _kept(elements: Elements, count: int) -> Elements:
        return Elements(elements.positions[:count], elements.values[:count])

    def keep_largest(self, elements: Elements, k: int) -> Elements:
        positions, values = map(address, elements)
        size = elements.values.size
        return self._kept(elements, self._library.dgc_keep_largest(positions, values, size, k, positions, values))

    def keep_at_least(self, elements: Elements, threshold: float) -> Elements:
        size = elements.values.size
        return self._kept(elements, self._library.dgc_keep_at_least(*map(address, elements), size, threshold))

    def kth_largest(self, values: np.ndarray, k: int) -> float:
        return self._library.dgc_kth_largest(address(values), values.size, k)

    # -- update of the residual, aggregation

    def update_residual(self, state: State, elements: Elements, decoded: np.ndarray, masked: np.ndarray | None) -> None:
        if masked is None and _FEW * decoded.size < len(state.v):
            state.put_off(Elements(elements.positions.copy(), elements.values - decoded))
            return
        u = None if masked is None else state.u
        what = (*map(address, elements), address(decoded), decoded.size, address(masked))
        self._library.dgc_settle(address(state.v), address(u), *what)

    def outputs(self, bucket: Bucket) -> NativeOutputs:
        return NativeOutputs(bucket)

    def aggregate_into(
        self, outputs: NativeOutputs, contributions: Sequence[Elements], scale: float, fresh: bool
    ) -> bool:
        table, threads = outputs.table, self.threads
        ranks = np.array(
            [(address(e.positions), address(e.values), e.values.size) for e in contributions], CONTRIBUTION
        )
        following = np.empty(threads * len(ranks), np.int64)
        arguments = (address(table), len(table), address(ranks), len(ranks), scale, fresh, address(following), threads)
        return bool(self._library.dgc_fill(*arguments))

    def aggregate_dense(self, outputs: NativeOutputs, summed: np.ndarray, scale: float) -> bool:
        return bool(self._library.dgc_fill_summed(address(outputs.table), len(outputs.table), address(summed), scale))
