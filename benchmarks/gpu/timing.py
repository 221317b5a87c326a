"""Times on a device: compress against the floor that memory sets and against the published flows, decode, growth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.baselines import FLOWS, PerTensorTopK, PublishedDGC, PublishedGaussianK
from benchmarks.shapes import Shapes, bert_large, gpt_1_3b, resnet50, vgg16
from dgc_horovod import DGCConfig
from dgc_horovod.core.bucketing import TensorSpec, plan
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.contract import MomentumCorrection
from dgc_horovod.kernels.triton.kernels import TritonKernels

MODELS: dict[str, Callable[[], Shapes]] = {
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "BERT-large": bert_large,
    "1.3 B": gpt_1_3b,
}
DENSITY, MOMENTUM, WORKERS = 0.001, 0.9, 8
BYTES = 20  # that any step which keeps u and v must move for each element
SETTLED = 20  # steps until thresholds follow
GROWTH_MILLIONS = (20, 50, 100, 200, 400)
_DRAWN = 1 << 22
_FEED = MomentumCorrection(MOMENTUM)


def device_name(device: str) -> str:
    """Of the machine's GPU."""
    return torch.cuda.get_device_name() if device != "cpu" else "none (Triton's interpreter: nothing here is a speed)"


def timed(
    action: Callable[[], Any], device: str, runs: int, warm_up: int = 3, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median milliseconds between two events around `action`, and least and most of them.

    Args:
        action: what is timed.
        device: on which it runs.
        runs, warm_up: how many times count, and how many before do not.
        before: called before each, not timed.
    """
    found: list[float] = []
    for number in range(warm_up + runs):
        before()
        if device == "cpu":
            start = time.perf_counter()
            action()
            found.append(1e3 * (time.perf_counter() - start))
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            action()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
        if number < warm_up:
            found.clear()
    return {"ms": statistics.median(found), "least": min(found), "most": max(found)}


def bandwidth(device: str, numel: int, runs: int) -> float:
    """Bytes a second of a copy, read and written."""
    source, target = (torch.zeros(numel, device=device) for _ in range(2))
    return 8 * numel / (timed(lambda: target.copy_(source), device, runs)["ms"] / 1e3)


class Worker:
    """The engines of one rank over a model's shapes on a device, with gradients of a scale for each coordinate.

    Args:
        shapes: of all parameters; those that are sent whole are left out.
        config: of the compression.
        device: where.
        workers: N.
    """

    def __init__(self, shapes: Shapes, config: DGCConfig, device: str, workers: int = 1) -> None:
        self.config, self.step = config, 0
        kernels = TritonKernels(device, registry.host_coder(0))
        specs = [TensorSpec(name, shape) for name, shape in shapes]
        buckets = [bucket for bucket in plan(specs, config, workers).buckets if not bucket.uncompressed]
        self.engines = [BucketEngine(bucket, config, kernels, 0, workers) for bucket in buckets]
        draw = torch.Generator(device).manual_seed(1)
        self._noise = torch.randn(2 * _DRAWN, generator=draw, device=device)
        self._scale = torch.randn(_DRAWN, generator=draw, device=device).exp_()
        self.gradients = [
            [torch.empty(segment.numel, device=device) for segment in engine.bucket.segments] for engine in self.engines
        ]
        self.advance()

    @property
    def numel(self) -> int:
        """Elements that are compressed."""
        return sum(engine.bucket.numel for engine in self.engines)

    @property
    def flat_gradients(self) -> list[torch.Tensor]:
        """One for each tensor."""
        return [gradient for gradients in self.gradients for gradient in gradients]

    def advance(self) -> None:
        """The next step's gradients, into the same memory."""
        for i, gradient in enumerate(self.flat_gradients):
            for number, part in enumerate(gradient.split(_DRAWN)):
                offset = (7919 * self.step + 104_729 * i + 1_299_709 * number) % _DRAWN
                torch.mul(self._noise[offset:][: part.numel()], self._scale[: part.numel()], out=part)

    def compress(self) -> list[np.ndarray]:
        """One step of every bucket; the packets."""
        packets = []
        for engine, gradients in zip(self.engines, self.gradients, strict=True):
            for i, gradient in enumerate(gradients):
                engine.add_gradient(i, gradient, _FEED)
            packets.append(engine.compress(1.0, self.step, self.config.final_density).payload)
        self.step += 1
        return packets

    def update_residual(self, steps: int) -> None:
        """Run `steps` steps."""
        for _ in range(steps):
            self.compress()
            self.advance()

    def receive(self, packets: Sequence[np.ndarray]) -> None:
        """Decode what every rank sent of every bucket into the gradients' memory."""
        for engine, gradients, packet in zip(self.engines, self.gradients, packets, strict=True):
            engine.receive(packet)
            for i, gradient in enumerate(gradients):
                engine.outputs.put(i, gradient)
            engine.aggregate_into(1 / engine.workers)


def models(
    device: str, runs: int, shapes_of: dict[str, Callable[[], Shapes]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each model: floor, compress, decode of eight packets, the published flows, launches."""
    rows = []
    for name, shapes in shapes_of.items():
        say(f"timing {name}")
        rows.append(_model(name, shapes(), device, runs))
        if device != "cpu":
            torch.cuda.empty_cache()
    return rows


def _model(name: str, shapes: Shapes, device: str, runs: int) -> dict[str, Any]:
    worker = Worker(shapes, DGCConfig(density=DENSITY), device, WORKERS)
    worker.update_residual(SETTLED if device != "cpu" else 3)
    numel = worker.numel
    speed = bandwidth(device, min(numel, 1 << 28), runs)
    row: dict[str, Any] = {
        "model": name, "numel": numel, "buckets": len(worker.engines), "bytes_per_second": speed,
        "floor_ms": 1e3 * BYTES * numel / speed,
        "compress": timed(worker.compress, device, runs, before=worker.advance),
    }  # fmt: skip
    row["launches"], row["busy_ms"] = _on_device(worker.compress, len(worker.engines), device)
    packets = [np.tile(packet, WORKERS) for packet in worker.compress()]
    row["decode"] = timed(partial(worker.receive, packets), device, runs)
    numels = [(gradient.numel(),) for gradient in worker.flat_gradients]
    for flow in FLOWS:
        baseline = flow(numels, DENSITY, MOMENTUM, device)
        action = partial(baseline.step, worker.flat_gradients)
        row[flow.name] = timed(action, device, max(3, runs // 4), 3, worker.advance)
        del baseline, action
    return row


def _on_device(action: Callable[[], Any], buckets: int, device: str) -> tuple[float | None, float | None]:
    """Kernels, copies and memory settings on the device, a bucket, and their milliseconds; None if none are seen."""
    if device == "cpu":
        return None, None
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        action()
        torch.cuda.synchronize()
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.device_time_total for event in on_device) / 1e3
    return len(on_device) / buckets or None, busy or None


def growth(device: str, runs: int, millions: Sequence[float], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Picoseconds an element of one tensor of d elements at 0.1%, as the GaussianK paper measures it."""
    rows = []
    for size in millions:
        say(f"growth, {size:g} M")
        numel = int(size * 1e6)
        config = DGCConfig(density=DENSITY, bucket_bytes=4 * numel)
        worker = Worker([("weight", (1000, numel // 1000))], config, device)
        worker.update_residual(SETTLED if device != "cpu" else 3)
        actions: dict[str, Callable[[], Any]] = {"ours": worker.compress}
        for flow in (PerTensorTopK, PublishedDGC, PublishedGaussianK):
            baseline = flow([(numel,)], DENSITY, MOMENTUM, device)
            actions[flow.name] = partial(baseline.step, worker.flat_gradients)
        for name, action in actions.items():
            rows.append({"millions": size, "flow": name, **timed(action, device, runs, 3, worker.advance)})
    return rows
