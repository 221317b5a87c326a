"""Shared by the studies of kernels: gradients that have been accumulated, engines over a model's shapes, C++ loops."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import Gradients, Shapes
from dgc_horovod import DGCConfig
from dgc_horovod.core.adam import SecondMoments
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.core.workspace import Message
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback, Kernels, MomentumCorrection
from dgc_horovod.stats import Traffic

MOMENTUM = 0.9


class Advancing:
    """The gradients of one rank, each step's in the memory of the last one's.

    Args:
        numels: of the tensors.
        device: where they are; None: NumPy arrays.

    Attributes:
        flat: all of them, one after the other.
        arrays: each tensor's part of `flat`.
    """

    def __init__(self, numels: Sequence[int], device: str | None = None) -> None:
        self._source, self._step = Gradients([(numel,) for numel in numels], device or "cpu"), 0
        flat = torch.empty(sum(numels), device=device)
        self._parts = flat.split(list(numels))
        self.flat: Any = flat if device else flat.numpy()
        self.arrays: list[Any] = [part if device else part.numpy() for part in self._parts]
        self.advance()

    def advance(self) -> None:
        """The next step's gradients, into the same memory."""
        for i, part in enumerate(self._parts):
            self._source.put(i, part, 0, self._step)
        self._step += 1


class Recorded:
    """As `Advancing`, those of a training run: one list of flat arrays a step, in the order of the buckets."""

    def __init__(self, steps: Sequence[list[np.ndarray]]) -> None:
        self._steps = iter(steps)
        self.advance()

    def advance(self) -> None:
        """The next step's gradients; after the last one they stay."""
        self.arrays = next(self._steps, None) or self.arrays


class Model:
    """The engines of one rank over a model's shapes, and their gradients; what an adapter does, without one.

    Args:
        gradients: function of the sizes of the tensors, in the order of the buckets.
        adam: whether the optimizer is Adam, and not SGD with momentum.
        small: whether there are engines of the small tensors too, which are sent whole.

    Attributes:
        launching: seconds of the last step until every bucket was under way on the device; of a host backend all.
        waiting: seconds in which the host then only waited for the device.
    """

    def __init__(
        self,
        shapes: Shapes,
        config: DGCConfig,
        kernels: Kernels,
        workers: int = 1,
        gradients: Callable[[Sequence[int]], Any] = Advancing,
        adam: bool = False,
        small: bool = True,
    ) -> None:
        self.config = config
        specs = [TensorSpec(name, shape) for name, shape in shapes]
        buckets = [each for each in plan(specs, config, workers).buckets if small or not each.uncompressed]
        self.engines = [BucketEngine(bucket, config, kernels, 0, workers) for bucket in buckets]
        self.gradients = gradients([s.numel for e in self.engines for s in e.bucket.segments])
        self.step, self.launching, self.waiting = 0, 0.0, 0.0
        sparse = [engine for engine in self.engines if not engine.bucket.uncompressed]
        place = {segment.name: (engine, i) for engine in sparse for i, segment in enumerate(engine.bucket.segments)}
        placed, topology = {name: shape for name, shape in shapes if name in place}, Topology(0, workers)
        self.adam = SecondMoments(placed, 0, place, topology, True, Traffic()) if adam else None

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(segment.numel for engine in self.engines for segment in engine.bucket.segments)

    def compress(self) -> list[Message]:
        """One step of every bucket: a device is given all of them before the first message is taken."""
        arrays, begin = iter(self.gradients.arrays), time.perf_counter()
        for engine in self.engines:
            for i, segment in enumerate(engine.bucket.segments):
                gradient, how = next(arrays), self._accumulation(engine, segment.name)
                if self.adam is not None:
                    self.adam.step = self.step
                    self.adam.measure(segment.name, gradient, how)
                engine.add_gradient(i, gradient, how)
            engine.begin_compress(1.0, self.step, self.config.density)
        self.launching, self.waiting, messages = time.perf_counter() - begin, 0.0, []
        for engine in self.engines:
            begin = time.perf_counter()
            while not engine.ready:
                pass
            self.waiting += time.perf_counter() - begin
            messages.append(engine.message())
        if self.adam is not None:
            message = self.adam.message()
            if message is not None:
                self.adam.receive(message)
            self.adam.close(True)
        self.step += 1
        return messages

    def _accumulation(self, engine: BucketEngine, name: str) -> Accumulation:
        if engine.bucket.uncompressed:
            return ErrorFeedback()
        return MomentumCorrection(MOMENTUM) if self.adam is None else self.adam.feed(name, 0.999, 1e-8, 1e-3)

    def accumulate(self, steps: int) -> None:
        """Run `steps` steps."""
        for _ in range(steps):
            self.compress()
            self.gradients.advance()

    def receive(self, packets: Sequence[np.ndarray]) -> None:
        """Decode all ranks' packets of every bucket into the gradients' memory; a device is waited for once."""
        arrays = iter(self.gradients.arrays)
        for engine, packet in zip(self.engines, packets, strict=True):
            engine.receive(packet)
            for i in range(len(engine.bucket.segments)):
                engine.outputs.put(i, next(arrays))
            engine.aggregate_into(1 / engine.workers)
        for engine in self.engines:
            engine.settle()


def compiled(source: str) -> ctypes.CDLL:
    """A library of the C++ functions in `source`, for this very processor."""
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "source.cpp"), Path(folder, "library.so")
        file.write_text(source)
        flags = ["-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run(["c++", *flags, file, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def _pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(x.ctypes.data) for x in arrays]


class Stream:
    """The floor of an accumulating step, with nothing selected.

    u and v read and written, g read: 20 bytes an element; without u, as with Adam, 12.
    """

    _SOURCE = """
    extern "C" void stream(float* __restrict u, float* __restrict v, const float* __restrict g, long n) {
        for (long i = 0; i < n; i++) { const float x = u[i] * 0.9f + g[i]; u[i] = x; v[i] += x; }
    }
    extern "C" void without(float* __restrict u, float* __restrict v, const float* __restrict g, long n) {
        for (long i = 0; i < n; i++) v[i] += g[i];
    }"""

    def __init__(self, numel: int, momentum: bool = True) -> None:
        library = compiled(self._SOURCE)
        self._stream = library.stream if momentum else library.without
        self._u, self._v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)

    def run(self, g: np.ndarray, start: int = 0) -> None:
        """Once over `g`, which belongs to u and v from element `start` on."""
        self._stream(*_pointers(self._u[start:], self._v[start:], g), ctypes.c_long(g.size))


class Scatter:
    """The floor of what is done to `count` elements of `numel`, at random places in their order, and nothing else."""

    _SOURCE = """
    extern "C" void settle(float* u, float* v, const int* at, const float* values, long k) {
        for (long i = 0; i < k; i++) { v[at[i]] -= values[i]; u[at[i]] = 0; }
    }
    extern "C" void add(float* out, const int* at, const float* values, long k) {
        for (long i = 0; i < k; i++) out[at[i]] += values[i];
    }"""

    def __init__(self, numel: int, count: int, seed: int = 0) -> None:
        self._library, rng = compiled(self._SOURCE), np.random.default_rng(seed)
        self.positions = np.sort(rng.choice(numel, count, replace=False).astype(np.int32))
        self._values = np.ones(count, np.float32)

    def settle(self, u: np.ndarray, v: np.ndarray) -> None:
        """They leave `v`, and `u` is emptied there."""
        self._library.settle(*_pointers(u, v, self.positions, self._values), ctypes.c_long(self.positions.size))

    def add_to(self, output: np.ndarray) -> None:
        """They are added to `output`."""
        self._library.add(*_pointers(output, self.positions, self._values), ctypes.c_long(self.positions.size))
