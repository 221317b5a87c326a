"""The kernels in C++, for torch CPU tensors and NumPy buffers alike: one call a bucket, no copy, no GIL."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dgc_horovod.bucket import Bucket
from dgc_horovod.codecs import INDEX_CODECS, VALUE_CODECS
from dgc_horovod.ops import native
from dgc_horovod.ops.schema import CHUNK, SPAN, AdamFeed, Elements, Feed, MomentumFeed, Seen, State
from dgc_horovod.packet import CHECKSUM_WORD, Coder, PacketFormat

_BAD_GRADIENT, _BAD_RESIDUAL = 1, 2
_RESIDUAL, _MOMENTUM, _NESTEROV, _ADAM = 1, 2, 3, 4  # enum Kind
_TINY = float(np.finfo(np.float32).smallest_subnormal)  # every element of at least this is not zero

# Structures of csrc/dgc.h, as records, so that a whole table is one array.
_SEGMENT = np.dtype(
    [("gradient", np.uintp), ("start", np.int64), ("numel", np.int64), ("kind", np.int32), ("momentum", np.float32)]
    + [(name, np.float32) for name in ("keep1", "take1", "keep2", "take2", "correction1", "root2", "eps")]
    + [("unused", np.int32)]
)
_FOUND = np.dtype(
    [(name, np.uintp) for name in ("positions", "values", "loose_positions", "loose_values")]
    + [("capacity", np.int64)]
    + [(name, np.uintp) for name in ("chunk_at", "chunk_count", "chunk_sums")]
    + [("count", np.int64)]
)
_TARGET = np.dtype([("out", np.uintp), ("start", np.int64), ("numel", np.int64)])
_CONTRIBUTION = np.dtype([("positions", np.uintp), ("values", np.uintp), ("count", np.int64)])
_LAYOUT = np.dtype(
    [(name, np.int64) for name in ("numel", "capacity", "values_at", "nbytes")]
    + [(name, np.int32) for name in ("index_codec", "value_codec", "low_bits", "unused")]
)


_NO_SEGMENTS = np.empty(0, _SEGMENT)


def _at(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class _Scratch:
    """Memory for what passes over vectors of up to `numel` elements find; grows and is used again."""

    def __init__(self, numel: int, spans: int) -> None:
        chunks = numel // CHUNK + 1 + spans
        self._chunks: list[np.ndarray] = [np.empty(chunks, np.int64), np.empty(chunks, np.int32)]
        self._chunks.append(np.empty(2 * chunks, np.float64))
        self.found = np.zeros(1, _FOUND)
        self.positions, self.values = np.empty(0, np.int32), np.empty(0, np.float32)
        for name, array in zip(("chunk_at", "chunk_count", "chunk_sums"), self._chunks, strict=True):
            self.found[name] = _at(array)

    @property
    def count(self) -> int:
        """How many elements were found."""
        return int(self.found["count"][0])

    def elements(self) -> Elements | None:
        """What was found, or None if it is more than there is room for."""
        count = self.count
        return Elements(self.positions[:count], self.values[:count]) if count <= self.positions.size else None

    def make_room(self, room: int) -> None:
        if room == self.positions.size:
            return
        self.positions, self.values = np.empty(room, np.int32), np.empty(room, np.float32)
        self._loose = np.empty(room, np.int32), np.empty(room, np.float32)
        arrays = (self.positions, self.values, *self._loose)
        for name, array in zip(("positions", "values", "loose_positions", "loose_values"), arrays, strict=True):
            self.found[name] = _at(array)
        self.found["capacity"] = room


class NativeGradients:
    """`schema.Gradients` as the table that the library reads."""

    def __init__(self, bucket: Bucket, kernels: NativeKernels) -> None:
        self.bucket, self._kernels = bucket, kernels
        self.table = np.zeros(len(bucket.segments), _SEGMENT)
        self.table["start"] = [segment.start for segment in bucket.segments]
        self.table["numel"] = [segment.numel for segment in bucket.segments]
        self._addresses = self.table["gradient"]
        self.arrays: list[np.ndarray | None] = [None] * len(bucket.segments)
        self._feeds: list[Feed | None] = [None] * len(bucket.segments)
        self.scratch: _Scratch | None = None

    def put(self, i: int, gradient: np.ndarray, feed: Feed) -> None:
        self.arrays[i] = gradient
        self._addresses[i] = gradient.ctypes.data
        if feed is not self._feeds[i] and feed != self._feeds[i]:  # it seldom changes, except Adam's
            self._feeds[i] = feed
            self._describe(self.table[i], feed)

    @staticmethod
    def _describe(row: Any, feed: Feed) -> None:
        row["kind"] = _RESIDUAL
        if isinstance(feed, MomentumFeed) and feed.momentum:
            row["kind"], row["momentum"] = (_NESTEROV if feed.nesterov else _MOMENTUM), feed.momentum
        elif isinstance(feed, AdamFeed):
            (b1, b2), t = feed.betas, feed.step
            row["kind"] = _ADAM
            row["keep1"], row["take1"], row["keep2"], row["take2"] = b1, 1 - b1, b2, 1 - b2
            row["correction1"], row["root2"], row["eps"] = 1 - b1**t, (1 - b2**t) ** 0.5, feed.eps

    def squared_norm(self) -> float:
        return sum(self._kernels.sums(gradient)[1] for gradient in self.arrays if gradient is not None)


class NativeTargets:
    """`schema.Targets` as the table that the library reads."""

    def __init__(self, bucket: Bucket) -> None:
        self.table = np.zeros(len(bucket.segments), _TARGET)
        self.table["start"] = [segment.start for segment in bucket.segments]
        self.table["numel"] = [segment.numel for segment in bucket.segments]
        self._addresses = self.table["out"]
        self._arrays: list[np.ndarray | None] = [None] * len(bucket.segments)

    def put(self, i: int, target: np.ndarray) -> None:
        self._arrays[i] = target
        self._addresses[i] = target.ctypes.data

    def clear(self) -> None:
        self._arrays = [None] * len(self._arrays)
        self._addresses[:] = 0


class NativeCoder:
    """`packet.Coder` in C++."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._layouts: dict[PacketFormat, np.ndarray] = {}

    def _layout(self, wire: PacketFormat) -> int | None:
        layout = self._layouts.get(wire)
        if layout is None:
            codes = INDEX_CODECS[wire.indices].code, VALUE_CODECS[wire.values].code
            record = (wire.numel, wire.capacity, wire.values_at, wire.body_bytes, *codes, wire.low_bits, 0)
            layout = self._layouts[wire] = np.array([record], _LAYOUT)
        return _at(layout)

    def encode(
        self, wire: PacketFormat, positions: np.ndarray, values: np.ndarray, body: np.ndarray, decoded: np.ndarray
    ) -> int:
        layout, count = self._layout(wire), positions.size
        return self._library.dgc_encode(layout, _at(positions), _at(values), count, _at(body), _at(decoded))

    def decode(
        self, wire: PacketFormat, body: np.ndarray, count: int, positions: np.ndarray, values: np.ndarray
    ) -> str:
        problem = self._library.dgc_decode(self._layout(wire), _at(body), count, _at(positions), _at(values))
        return ("", f"positions are not ascending within [0, {wire.numel})", "values or scales no sender writes")[
            problem
        ]

    def checksum(self, packet: np.ndarray) -> int:
        return self._library.dgc_checksum(_at(packet), packet.size // 4, CHECKSUM_WORD)


class NativeKernels:
    """`schema.Kernels` on NumPy arrays, in C++.

    Args:
        threads: most threads to use; 0: as many as torch does, one without torch.
        library: as returned by `native.load`.
    """

    name = "native"
    array_kind = "numpy"

    def __init__(self, threads: int = 0, library: Any = None) -> None:
        self._library = library or native.load()
        self._fixed_threads = threads
        self.coder: Coder = NativeCoder(self._library)

    @property
    def threads(self) -> int:
        """Threads that a call may use now."""
        torch = sys.modules.get("torch")
        return self._fixed_threads or (torch.get_num_threads() if torch is not None else 1)

    @property
    def instructions(self) -> str:
        """The instruction set in use: plain, AVX2 or AVX-512."""
        return self._library.dgc_instructions().decode()

    def use_instructions(self, name: str) -> bool:
        """Use instruction set `name`, in the whole process; returns whether this processor has it."""
        return bool(self._library.dgc_use_instructions(name.encode()))

    # -- arrays

    def new(self, numel: int) -> np.ndarray:
        return np.zeros(numel, np.float32)

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def from_host(self, values: np.ndarray) -> np.ndarray:
        return values

    def fill_zero(self, x: np.ndarray) -> None:
        x.fill(0)

    def take(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return x[positions]

    def put(self, x: np.ndarray, elements: Elements) -> None:
        self._library.dgc_put(_at(x), _at(elements.positions), _at(elements.values), elements.values.size)

    # -- the pass over a bucket

    def gradients(self, bucket: Bucket) -> NativeGradients:
        return NativeGradients(bucket, self)

    def take_in(
        self, gradients: NativeGradients, state: State, scale: float, spans: np.ndarray, room: int, moments: bool
    ) -> Seen:
        if gradients.scratch is None:
            gradients.scratch = _Scratch(gradients.bucket.numel, len(spans))
        bad = self._pass(gradients.scratch, room, state.v, spans, moments, gradients.table, state, scale)
        gradients.arrays = [None] * len(gradients.arrays)
        scratch = gradients.scratch
        return Seen(not bad & _BAD_GRADIENT, not bad & _BAD_RESIDUAL, scratch.count, scratch.elements())

    def _pass(
        self,
        scratch: _Scratch,
        room: int,
        v: np.ndarray,
        spans: np.ndarray,
        moments: bool,
        segments: np.ndarray = _NO_SEGMENTS,
        state: State | None = None,
        scale: float = 1.0,
    ) -> int:
        scratch.make_room(room)
        first, second = (None, None) if state is None else state.moments or (state.u, None)
        return self._library.dgc_pass(
            _at(v), _at(first), _at(second), _at(segments), len(segments), scale,
            _at(spans), len(spans), moments, _at(scratch.found), self.threads,
        )  # fmt: skip

    def _span(self, x: np.ndarray, floor: float) -> np.ndarray:
        return np.array([(0, x.size, 0.0, 0.0, floor, 0)], SPAN)

    # -- looking at v

    def sums(self, x: np.ndarray) -> tuple[float, float]:
        out, chunk_sums = np.empty(2), np.empty(2 * (x.size // CHUNK + 1))
        self._library.dgc_sums(_at(x), x.size, _at(chunk_sums), self.threads, _at(out))
        return float(out[0]), float(out[1])

    def moments(self, x: np.ndarray) -> tuple[float, float]:
        span = self._span(x, np.inf)
        self._pass(_Scratch(x.size, 1), 0, x, span, True)
        return float(span["sum"][0]), float(span["squares"][0])

    def count_at_least(self, x: np.ndarray, threshold: float) -> int:
        return self._library.dgc_count_at_least(_at(x), x.size, threshold, self.threads)

    def at_least(self, x: np.ndarray, threshold: float) -> Elements:
        scratch, span = _Scratch(x.size, 1), self._span(x, max(threshold, _TINY))
        self._pass(scratch, min(x.size, x.size // 16 + CHUNK), x, span, False)
        if scratch.elements() is None:
            self._pass(scratch, scratch.count, x, span, False)
        found = scratch.elements()
        assert found is not None
        return found

    def top_k(self, x: np.ndarray, k: int) -> Elements:
        room = min(k, x.size)
        into = Elements(np.empty(room, np.int32), np.empty(room, np.float32))
        return self._kept(into, self._library.dgc_keep_largest(None, _at(x), x.size, k, *map(_at, into)))

    def sample(self, x: np.ndarray, start: int, stride: int) -> np.ndarray:
        return np.abs(x[start::stride])

    # -- among few elements

    @staticmethod
    def _kept(elements: Elements, count: int) -> Elements:
        return Elements(elements.positions[:count], elements.values[:count])

    def keep_largest(self, elements: Elements, k: int) -> Elements:
        positions, values = map(_at, elements)
        size = elements.values.size
        return self._kept(elements, self._library.dgc_keep_largest(positions, values, size, k, positions, values))

    def keep_at_least(self, elements: Elements, threshold: float) -> Elements:
        size = elements.values.size
        return self._kept(elements, self._library.dgc_keep_at_least(*map(_at, elements), size, threshold))

    def kth_largest(self, values: np.ndarray, k: int) -> float:
        return self._library.dgc_kth_largest(_at(values), values.size, k)

    # -- what was sent leaves, what came back is added

    def settle(self, state: State, elements: Elements, decoded: np.ndarray, masked: np.ndarray | None) -> None:
        u = None if masked is None else state.u
        what = (*map(_at, elements), _at(decoded), decoded.size, _at(masked))
        self._library.dgc_settle(_at(state.v), _at(u), *what)

    def targets(self, bucket: Bucket) -> NativeTargets:
        return NativeTargets(bucket)

    def fill(self, targets: NativeTargets, contributions: Sequence[Elements], scale: float, fresh: bool) -> bool:
        table, threads = targets.table, self.threads
        ranks = np.array([(_at(e.positions), _at(e.values), e.values.size) for e in contributions], _CONTRIBUTION)
        following = np.empty(threads * len(ranks), np.int64)
        arguments = (_at(table), len(table), _at(ranks), len(ranks), scale, fresh, _at(following), threads)
        return bool(self._library.dgc_fill(*arguments))

    def fill_summed(self, targets: NativeTargets, summed: np.ndarray, scale: float) -> bool:
        return bool(self._library.dgc_fill_summed(_at(targets.table), len(targets.table), _at(summed), scale))
