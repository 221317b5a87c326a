"""Memory of Triton kernels: tables of a bucket, uploads and downloads of each step, recorded launches."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import torch
import triton

from dgc_horovod import envvars
from dgc_horovod.errors import BackendUnavailable
from dgc_horovod.kernels.triton.accumulate import touch
from dgc_horovod.kernels.triton.encode import HEADER_WORDS
from dgc_horovod.wire.bucket import Bucket
from dgc_horovod.wire.packet import PacketFormat

_log = logging.getLogger(__name__)
_ALIGNED, _WORD = 16, 4  # bytes
_OLDEST = 3, 6  # before it div_rn and sqrt_rn become div.rn.ftz and sqrt.rn.ftz: not the CPU's bits


class Upload:
    """Small arrays that the host writes at each step and the device reads, sent by one copy.

    Args:
        device: device that the arrays are sent to.
        fields: dtype and number of elements of each array, by name.

    Attributes:
        host: NumPy arrays to be written, by name.
        device: tensors with the content of the last `send`, by name.
    """

    def __init__(self, device: torch.device, fields: dict[str, tuple[torch.dtype, int]]) -> None:
        ends = np.cumsum([0] + [-(-dtype.itemsize * size // _ALIGNED) * _ALIGNED for dtype, size in fields.values()])
        self._host = torch.zeros(int(ends[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(int(ends[-1]), dtype=torch.uint8, device=device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        for at, (name, (dtype, size)) in zip(ends.tolist(), fields.items(), strict=False):
            place = slice(at, at + dtype.itemsize * size)
            self.host[name] = self._host[place].view(dtype).numpy()
            self.device[name] = self._device[place].view(dtype)

    def send(self) -> None:
        """Start the copy; the device must have read the previous one, as the host has written over it already."""
        self._device.copy_(self._host, non_blocking=True)


# One for the process, as torch's allocator is: one graph is recorded at a time; graphs of failed recordings are kept
_recording = threading.Lock()
_spoiled: list[torch.cuda.CUDAGraph] = []


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Recorded:
    """A sequence of launches that is equal at every step: recorded once as a CUDA graph, then replayed by one launch.

    A launch of a Triton kernel takes the host about ten microseconds, as long as many of these kernels run.

    Args:
        device: device of the kernels; on other devices than CUDA they are launched one by one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._key, self._graph = device, None, None  # type: tuple[torch.device, Hashable, Any]
        self._may_record = device.type == "cuda" and envvars.value(envvars.CUDA_GRAPHS)

    def launch(self, key: Hashable, kernels: Callable[[], None]) -> None:
        """Launch the kernels on the current stream.

        Args:
            key: everything that the launches depend on except contents of memory: addresses of tensors, forms of
                kernels; not None.
            kernels: function that launches the kernels, without waits and allocations.
        """
        if key == self._key and self._graph is None and self._may_record:
            self._graph = self._record(kernels)
        elif key != self._key:  # the first launch of a key may compile, which cannot be recorded
            self._key, self._graph = key, None
        if self._graph is not None:
            self._graph.replay()
        else:
            kernels()

    def _record(self, kernels: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Record the graph; return None if an operation of another thread on the device made the recording fail."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stream, current = _recording_stream(self._device), torch.cuda.current_stream(self._device)
        try:
            with _recording:
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        kernels()
                    finally:
                        graph.capture_end()
                current.wait_stream(stream)
        except RuntimeError as error:  # for example a synchronize(): nothing has run, and single launches work
            _log.warning("dgc_horovod: recording a CUDA graph failed; kernels are launched one by one: %s", error)
            self._may_record = False
            _spoiled.append(graph)
            with suppress(Exception):  # the last action of capture_end(), after the call that raised
                torch._C._cuda_endAllocateToPool(current.device_index, pool)
            return None
        return graph


class BucketMap:
    """The segments of a bucket, for programs that have one block each.

    Args:
        bucket: layout of the bucket.
        block: number of elements of a program.
        device: device that holds the tables.
    """

    def __init__(self, bucket: Bucket, block: int, device: torch.device) -> None:
        starts = np.array([*(segment.start for segment in bucket.segments), bucket.numel], np.int64)
        first = np.arange(0, bucket.numel, block)
        last = np.minimum(first + block, bucket.numel) - 1
        spread = np.stack([np.searchsorted(starts, at, side="right") - 1 for at in (first, last)], axis=1)
        self.blocks = len(first)
        self.aligned = not (starts % 4).any()
        self.bounds = first[1:]  # first elements of the blocks after the first
        self.starts = torch.from_numpy(starts.astype(np.int32)).to(device)
        self.spread = torch.from_numpy(spread.astype(np.int32).ravel()).to(device)


def addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the address of each tensor; none may be None."""
    assert all(tensor is not None for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def value_words(wire: PacketFormat) -> tuple[int, int]:
    """Return the indices of the words of a packet where its values and their scales begin."""
    return HEADER_WORDS.value + wire.values_at // _WORD, HEADER_WORDS.value + wire.scales_at // _WORD


def using(device: torch.device) -> AbstractContextManager[object]:
    """Inside, kernels are launched on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Arrival:
    """A place in a stream: the host waits until the device has reached it, not for what was launched after it.

    Args:
        device: device of the stream; on other devices than CUDA launches return when their work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Set the place: the end of the present device's current stream."""
        if self._event is not None:
            self._event.record()

    @property
    def is_there(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait for the device."""
        if self._event is not None:
            self._event.synchronize()


def _wait_for_stream(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        stream.synchronize()


class Fence:
    """Waits for launches on a device: one wait covers all launches before it.

    Args:
        device: device of the launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._marked, self._passed = device, 0, 0
        self._streams: set[torch.cuda.Stream | None] = set()  # with launches since the last wait

    def mark(self) -> int:
        """Mark the launches so far on the current stream; return the mark for `wait`."""
        self._streams.add(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)
        self._marked += 1
        return self._marked

    def wait(self, mark: int) -> None:
        """Wait for the launches before `mark`, unless an earlier wait has covered them."""
        if mark > self._passed:
            for stream in self._streams:
                _wait_for_stream(stream)
            self._streams.clear()
            self._passed = self._marked


def check_that_it_runs(device: torch.device) -> None:
    """Launch a test kernel: Triton needs a C compiler for its launcher, and does not support every GPU.

    Raises:
        BackendUnavailable: no kernel runs on the device.
    """
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise BackendUnavailable(f"Triton {triton.__version__} flushes denormals; {oldest} or later is needed")
    interpreted = not isinstance(touch, triton.JITFunction)
    if device.type != "cuda" and not interpreted:
        raise BackendUnavailable(f"Triton runs on CUDA devices, not on {device.type}")
    if device.type == "cuda" and (interpreted or torch.version.hip):
        raise BackendUnavailable("TRITON_INTERPRET is set" if interpreted else "AMD GPUs have not been tested")
    try:
        found = torch.zeros(1, dtype=torch.int32, device=device)
        with using(device):
            touch[(1,)](found)
        found.cpu()  # waits for it
    except Exception as error:  # of any kind: a missing compiler, an old driver
        raise BackendUnavailable(f"Triton runs no kernel here ({type(error).__name__}: {error})") from None


def on_host(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory for asynchronous copies from the device."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")


def is_pinned(x: torch.Tensor) -> bool:
    """Return whether the device can copy from `x` while the host goes on."""
    return x.is_pinned()


# Products are rounded before they are added, as everywhere (`kernels.contract`).
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
