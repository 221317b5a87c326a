"""What Triton kernels are given: tables that describe a bucket, and what goes to the device and back at each step."""

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
        device: tensors as after the last `send`, by name.
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
        """Start the copy; what was sent before must have been read."""
        self._device.copy_(self._host, non_blocking=True)


# Of the process, as torch's allocator is: one graph is recorded at a time, and one whose recording has failed is kept
_recording = threading.Lock()
_spoiled: list[torch.cuda.CUDAGraph] = []


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Recorded:
    """Kernels that are launched alike at every step: recorded once as a CUDA graph, then replayed by one launch.

    Launching a Triton kernel takes the host some ten microseconds, as long as many of these kernels run.

    Args:
        device: device that the kernels run on; on others than CUDA's they are launched each time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._key, self._graph = device, None, None  # type: tuple[torch.device, Hashable, Any]
        self._may_record = device.type == "cuda" and envvars.value(envvars.CUDA_GRAPHS)

    def launch(self, key: Hashable, kernels: Callable[[], None]) -> None:
        """Have the kernels run on the current stream.

        Args:
            key: all that the launches depend on but the contents of memory: where tensors lie, forms of kernels; not
                None.
            kernels: launches them, and neither waits nor allocates.
        """
        if key == self._key and self._graph is None and self._may_record:
            self._graph = self._record(kernels)
        elif key != self._key:  # Triton compiles what it has not seen: that is not recorded
            self._key, self._graph = key, None
        if self._graph is not None:
            self._graph.replay()
        else:
            kernels()

    def _record(self, kernels: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """The graph; None if another thread has done to the device meanwhile what no recording survives."""
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
        except RuntimeError as error:  # a synchronize(), say: nothing has run, and launches do as well
            _log.warning("dgc_horovod: kernels are launched one by one from now on, recording them failed: %s", error)
            self._may_record = False
            _spoiled.append(graph)
            with suppress(Exception):  # what capture_end() does last, after the call that raised
                torch._C._cuda_endAllocateToPool(current.device_index, pool)
            return None
        return graph


class BucketMap:
    """Where the segments of a bucket are, for programs that have a block of it each.

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
        self.bounds = first[1:]  # between two blocks
        self.starts = torch.from_numpy(starts.astype(np.int32)).to(device)
        self.spread = torch.from_numpy(spread.astype(np.int32).ravel()).to(device)


def addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Where each begins; all must be there."""
    assert all(tensor is not None for tensor in tensors)
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


def is_narrow(u: torch.Tensor | None) -> bool:
    """Whether it is bfloat16."""
    return u is not None and u.dtype == torch.bfloat16


def bits_of(u: torch.Tensor | None) -> torch.Tensor | None:
    """A bfloat16 vector as its bits, int16, which kernels round to as the CPU does; others as they are."""
    return u.view(torch.int16) if u is not None and is_narrow(u) else u


def value_words(wire: PacketFormat) -> tuple[int, int]:
    """The words of a packet where its values and their scales begin."""
    return HEADER_WORDS.value + wire.values_at // _WORD, HEADER_WORDS.value + wire.scales_at // _WORD


def using(device: torch.device) -> AbstractContextManager[object]:
    """Kernels that are launched inside run on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Until the device has done what the current stream was given: the only thing here that blocks the host."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def check_that_it_runs(device: torch.device) -> None:
    """Launch a kernel: Triton builds its launcher with the machine's C compiler, and not every GPU is one of its.

    Raises:
        BackendUnavailable: no kernel runs there.
    """
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise BackendUnavailable(f"Triton {triton.__version__} rounds denormals away, {oldest} or later is needed")
    interpreted = not isinstance(touch, triton.JITFunction)
    if device.type != "cuda" and not interpreted:
        raise BackendUnavailable(f"Triton runs on CUDA devices, not on {device.type}")
    if device.type == "cuda" and (interpreted or torch.version.hip):
        raise BackendUnavailable("TRITON_INTERPRET is set" if interpreted else "AMD GPUs have not been tried")
    try:
        found = torch.zeros(1, dtype=torch.int32, device=device)
        with using(device):
            touch[(1,)](found)
        wait_for(device)
    except Exception as error:  # of many kinds: a compiler is missing, the driver is old
        raise BackendUnavailable(f"Triton runs no kernel here ({type(error).__name__}: {error})") from None


def on_host(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory into which a device can copy while the host goes on."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")


# Products are rounded before they are added, as everywhere (`kernels.contract`).
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
