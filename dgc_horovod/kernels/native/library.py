"""The native library (csrc/): loading, memory, and the tables that it reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dgc_horovod.errors import BackendUnavailable, UnsupportedUse
from dgc_horovod.kernels.contract import CHUNK, Accumulation, Array, Elements, Kernels, MomentumCorrection, SharedMoment
from dgc_horovod.kernels.reference import ListedGradients, ListedOutputs
from dgc_horovod.wire.bucket import Bucket

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_INTERFACE = 11  # of dispatch.cpp
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dgc_interface": (_INT, ()),
    "dgc_use_openmp": (None, (_POINTER,)),
    "dgc_instructions": (ctypes.c_char_p, ()),
    "dgc_use_instructions": (_INT, (ctypes.c_char_p,)),
    "dgc_pass": (
        _INT,
        (_POINTER, _LONG, *[_POINTER] * 2, _LONG, *[_FLOAT] * 2, *[_POINTER] * 2, _LONG, _INT, _POINTER, _LONG),
    ),
    "dgc_sums": (None, (_POINTER, _LONG, _POINTER, _LONG, _POINTER)),
    "dgc_measure": (None, (_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER)),
    "dgc_count_at_least": (_LONG, (_POINTER, _LONG, _FLOAT, _LONG)),
    "dgc_kth_largest": (_FLOAT, (_POINTER, _LONG, _LONG)),
    "dgc_keep_largest": (_LONG, (_POINTER, _POINTER, _LONG, _LONG, _POINTER, _POINTER)),
    "dgc_keep_at_least": (_LONG, (_POINTER, _POINTER, _LONG, _FLOAT)),
    "dgc_settle": (None, (*[_POINTER] * 5, _LONG, _POINTER)),
    "dgc_put": (None, (_POINTER, _POINTER, _POINTER, _LONG)),
    "dgc_fill": (_INT, (_POINTER, _LONG, _POINTER, _LONG, _FLOAT, _INT, _POINTER, _LONG)),
    "dgc_fill_summed": (_INT, (_POINTER, _LONG, _POINTER, _FLOAT)),
    "dgc_encode": (_LONG, (_POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER)),
    "dgc_decode": (_INT, (_POINTER, _POINTER, _LONG, _POINTER, _POINTER)),
    "dgc_checksum": (ctypes.c_uint32, (_POINTER, _LONG, _LONG)),
}


def library_paths() -> list[Path]:
    """Return the built libraries beside this file, that of this processor first: several may share a folder."""
    ours = f"_native.{platform.machine()}.so"
    return sorted(Path(__file__).parent.glob("_native*.so"), key=lambda path: (path.name != ours, path.name))


def load(path: Path | None = None) -> ctypes.CDLL:
    """Load the library at `path`, or the first of `library_paths` that loads, and declare its functions.

    Raises:
        BackendUnavailable: it was not built, or does not load; or this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise BackendUnavailable("the native library needs a little-endian machine; this one is big-endian")
    problems = []
    for each in [path] if path else library_paths():
        try:
            return _loaded(each)
        except BackendUnavailable as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    raise BackendUnavailable("the native library was not built (no C++ compiler when dgc_horovod was installed)")


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"the native library does not load: {error}") from error
    if (theirs := library.dgc_interface()) != _INTERFACE:
        raise BackendUnavailable(
            f"{path.name} has interface {theirs}, this version needs {_INTERFACE}; install dgc_horovod again"
        )
    library.dgc_use_openmp(openmp_of_the_process())
    return library


def openmp_of_the_process() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded, or None."""
    if "torch" not in sys.modules:
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "omp" in line and ".so" in line}
    for path in sorted(paths, key=lambda path: ("/torch/lib/" not in path and "/torch.libs/" not in path, path)):
        name = Path(path).name
        if name.startswith(("libgomp", "libiomp", "libomp")):
            try:
                return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, _POINTER).value
            except (OSError, AttributeError):
                continue
    return None


_PAGE = 4096  # bytes
_HUGE_PAGE = 2 << 20


def zeros(numel: int) -> np.ndarray:
    """Return a float32 vector of zeros that begins at a page; a large one is in huge pages if Linux allows it.

    A pass reads a gradient and writes u and v at the same pace. Gradients begin up to a cache line after a page
    (malloc's header). If u or v began later within a page, they would be written just ahead of the gradient's reads
    modulo the page size; processors take these for the same address and wait (4K aliasing). Small pages are slower too,
    mostly on a virtual machine, unless the allocator is set (GLIBC_TUNABLES) to use huge ones.

    Args:
        numel: number of elements, >= 0.

    Returns:
        A vector whose memory has not been written yet.

    Raises:
        MemoryError: there is not enough memory.

    Cost: up to 4 KiB more; for a large vector up to 2 MiB more, and 4 MiB of addresses.
    """
    nbytes = 4 * numel
    if nbytes < _HUGE_PAGE:
        return _aligned(np.zeros(nbytes + _PAGE, np.uint8), nbytes, _PAGE).view(np.float32)
    try:
        room = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes:,} bytes of residual or momentum: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(room, np.uint8), nbytes, _HUGE_PAGE).view(np.float32)


def _aligned(room: np.ndarray, nbytes: int, multiple: int) -> np.ndarray:
    first = -room.ctypes.data % multiple
    return room[first : first + nbytes]


_RESIDUAL, _MOMENTUM, _NESTEROV, _SHARED = 1, 2, 3, 4  # enum Kind

# Structures of csrc/dgc.h as NumPy records; a table is one array.
SEGMENT = np.dtype(
    [("gradient", np.uintp), ("start", np.int64), ("numel", np.int64), ("kind", np.int32), ("momentum", np.float32)]
    + [("rows", np.uintp), ("columns", np.uintp), ("width", np.int64), ("offset", np.int64), ("bound", np.float32)]
    + [("unused", np.int32)]
)
FOUND = np.dtype(
    [(name, np.uintp) for name in ("positions", "values", "loose_positions", "loose_values")]
    + [("capacity", np.int64)]
    + [(name, np.uintp) for name in ("chunk_at", "chunk_count", "chunk_sums")]
    + [("count", np.int64), ("sum", np.float64), ("squares", np.float64)]
)
TARGET = np.dtype([("out", np.uintp), ("start", np.int64), ("numel", np.int64)])
CONTRIBUTION = np.dtype([("positions", np.uintp), ("values", np.uintp), ("count", np.int64)])
LAYOUT = np.dtype(
    [(name, np.int64) for name in ("numel", "capacity", "values_at")]
    + [(name, np.int32) for name in ("index_codec", "value_codec", "low_bits", "unused")]
)
NO_SEGMENTS = np.empty(0, SEGMENT)


def address(array: Array | None) -> int | None:
    """Return the address of a contiguous array or tensor for a call; the caller keeps it alive."""
    if array is None:
        return None
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


class Scratch:
    """Reusable memory for the candidates and sums of passes over vectors of up to `numel` elements."""

    def __init__(self, numel: int) -> None:
        chunks = numel // CHUNK + 1
        self._chunks: list[np.ndarray] = [np.empty(chunks, np.int64), np.empty(chunks, np.int32)]
        self._chunks.append(np.empty(2 * chunks, np.float64))
        self.found = np.zeros(1, FOUND)
        self.positions, self.values = np.empty(0, np.int32), np.empty(0, np.float32)
        for name, array in zip(("chunk_at", "chunk_count", "chunk_sums"), self._chunks, strict=True):
            self.found[name] = address(array)

    @property
    def count(self) -> int:
        """Number of elements found."""
        return int(self.found["count"][0])

    @property
    def sums(self) -> tuple[float, float]:
        """Sum and sum of squares, if they were wanted."""
        return float(self.found["sum"][0]), float(self.found["squares"][0])

    def elements(self) -> Elements | None:
        """Return the elements found, or None if they exceed the capacity."""
        count = self.count
        return Elements(self.positions[:count], self.values[:count]) if count <= self.positions.size else None

    def make_room(self, capacity: int) -> None:
        if capacity == self.positions.size:
            return
        self.positions, self.values = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
        self._loose = np.empty(capacity, np.int32), np.empty(capacity, np.float32)
        arrays = (self.positions, self.values, *self._loose)
        for name, array in zip(("positions", "values", "loose_positions", "loose_values"), arrays, strict=True):
            self.found[name] = address(array)
        self.found["capacity"] = capacity


def _table(bucket: Bucket, record: np.dtype) -> np.ndarray:
    """Return a table with one record for each segment, with its start and numel."""
    table = np.zeros(len(bucket.segments), record)
    table["start"] = [segment.start for segment in bucket.segments]
    table["numel"] = [segment.numel for segment in bucket.segments]
    return table


class NativeGradients(ListedGradients):
    """`contract.Gradients`, also as the table that the library reads."""

    def __init__(self, bucket: Bucket, kernels: Kernels) -> None:
        super().__init__(bucket, kernels)
        self.table = _table(bucket, SEGMENT)
        self.table["kind"] = _RESIDUAL  # as `accumulations` begin
        self._addresses = self.table["gradient"]
        self._nbytes = [4 * segment.numel for segment in bucket.segments]
        self._dtype: object = None  # the dtype object that was found to be float32, NumPy's or torch's
        self.scratch: Scratch | None = None

    def put(self, i: int, gradient: Array, accumulation: Accumulation) -> None:
        if gradient.dtype is not self._dtype or gradient.nbytes != self._nbytes[i]:
            self._check(i, gradient)
        self.arrays[i] = gradient
        self._addresses[i] = address(gradient)
        if accumulation is not self.accumulations[i] and accumulation != self.accumulations[i]:  # it changes rarely
            self.accumulations[i] = accumulation
            self._describe(self.table[i], accumulation)

    def _check(self, i: int, gradient: Array) -> None:
        """Raise UnsupportedUse unless `gradient` has the dtype and size that the library reads at its address."""
        dtype, segment = gradient.dtype, self.bucket.segments[i]
        if str(dtype).removeprefix("torch.") != "float32" or gradient.nbytes != self._nbytes[i]:
            raise UnsupportedUse(
                f"the gradient of {segment.name!r} has {gradient.nbytes} bytes of {dtype}, expected {segment.numel} "
                "numbers of float32"
            )
        self._dtype = dtype

    @staticmethod
    def _describe(row: Any, accumulation: Accumulation) -> None:
        row["kind"], row["rows"], row["columns"] = _RESIDUAL, 0, 0
        if isinstance(accumulation, MomentumCorrection) and accumulation.momentum:
            row["kind"], row["momentum"] = (_NESTEROV if accumulation.nesterov else _MOMENTUM), accumulation.momentum
        elif isinstance(accumulation, SharedMoment):  # its arrays stay alive in `accumulations`
            row["kind"], row["offset"], row["width"] = _SHARED, accumulation.offset, len(accumulation.columns)
            row["rows"], row["columns"] = address(accumulation.rows), address(accumulation.columns)
            row["bound"] = accumulation.bound


class NativeOutputs(ListedOutputs):
    """`contract.Outputs`, also as the table that the library reads."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket)
        self.table = _table(bucket, TARGET)
        self._addresses = self.table["out"]

    def put(self, i: int, output: Array) -> None:
        self.arrays[i] = output
        self._addresses[i] = address(output)

    def clear(self) -> None:
        super().clear()
        self._addresses[:] = 0
