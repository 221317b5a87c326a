"""Memory for what is kept of every parameter, laid out as a pass over all of it is fastest."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

_PAGE = 4096  # bytes
_HUGE_PAGE = 2 << 20


def zeros(numel: int, dtype: type = np.float32) -> np.ndarray:
    """A vector of zeros that begins with a page; a large one lies in huge pages, where Linux lets it.

    A pass reads a gradient and writes u and v at the same pace. Gradients begin up to a cache line behind a page
    (malloc's header). A vector that began behind them would be written just ahead of where they are read, modulo the
    size of a page; processors take that for the same place and wait (4K aliasing). Small pages cost time too, most on a
    virtual machine, if the allocator has not been told (GLIBC_TUNABLES) to ask for huge ones.

    Args:
        numel: elements, >= 0.
        dtype: of them.

    Returns:
        A vector, written nowhere yet.

    Raises:
        MemoryError: there is not so much.

    Cost: up to 4 KiB more, of a large one up to 2 MiB, and 4 MiB of addresses.
    """
    nbytes = np.dtype(dtype).itemsize * numel
    if nbytes < _HUGE_PAGE:
        return _aligned(np.zeros(nbytes + _PAGE, np.uint8), nbytes, _PAGE).view(dtype)
    try:
        room = mmap.mmap(-1, nbytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes:,} bytes of residual or momentum: {error}") from error
    with contextlib.suppress(AttributeError, OSError):  # another system, a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(room, np.uint8), nbytes, _HUGE_PAGE).view(dtype)


def _aligned(room: np.ndarray, nbytes: int, multiple: int) -> np.ndarray:
    first = -room.ctypes.data % multiple
    return room[first : first + nbytes]
