"""Times on a device: compress against the floor that memory sets and against the published flows, decode, growth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.baselines import FLOWS, PerTensorTopK, PublishedDGC, PublishedGaussianK
from benchmarks.gpu import say
from benchmarks.kernels.bench import MOMENTUM, Model
from benchmarks.shapes import Shapes, bert_large, gpt_1_3b, resnet50, vgg16
from benchmarks.timing import times, wall_clock
from dgc_horovod import DGCConfig
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.triton.kernels import TritonKernels

MODELS: dict[str, Callable[[], Shapes]] = {
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "BERT-large": bert_large,
    "1.3 B": gpt_1_3b,
}
DENSITY, WORKERS = 0.001, 8
BYTES = 20  # that any step which keeps u and v must move for each element
SETTLED = 20  # steps until thresholds follow
GROWTH_MILLIONS = (20, 50, 100, 200, 400)
_DRAWN = 1 << 22


def device_name(device: str) -> str:
    """Of the machine's GPU."""
    return torch.cuda.get_device_name() if device != "cpu" else "none (Triton's interpreter: nothing here is a speed)"


def timed(
    action: Callable[[], Any], device: str, runs: int, before: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of `action` on its device, and least and most of them; see `timing.times`."""
    (found,) = times(action, before=before, runs=runs, clock=wall_clock if device == "cpu" else _events)
    return {"ms": statistics.median(found), "least": min(found), "most": max(found)}


def _events(action: Callable[[], Any]) -> float:
    """Milliseconds between two events on the device around a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def bandwidth(device: str, numel: int, runs: int) -> float:
    """Bytes a second of a copy, read and written."""
    source, target = (torch.zeros(numel, device=device) for _ in range(2))
    return 8 * numel / (timed(lambda: target.copy_(source), device, runs)["ms"] / 1e3)


class Gradients:
    """Gradients on a device, of a scale for each coordinate; see `bench.Gradients`."""

    def __init__(self, numels: Sequence[int], device: str) -> None:
        draw, self._step = torch.Generator(device).manual_seed(1), 0
        self._noise = torch.randn(2 * _DRAWN, generator=draw, device=device)
        self._scale = torch.randn(_DRAWN, generator=draw, device=device).exp_()
        self.arrays = [torch.empty(numel, device=device) for numel in numels]
        self.advance()

    def advance(self) -> None:
        """The next step's gradients, into the same memory."""
        for i, gradient in enumerate(self.arrays):
            for number, part in enumerate(gradient.split(_DRAWN)):
                offset = (7919 * self._step + 104_729 * i + 1_299_709 * number) % _DRAWN
                torch.mul(self._noise[offset:][: part.numel()], self._scale[: part.numel()], out=part)
        self._step += 1


def _worker(shapes: Shapes, config: DGCConfig, device: str, workers: int = 1) -> Model:
    """A rank over the tensors that are compressed, after steps in which its thresholds have settled."""
    kernels = TritonKernels(device, registry.host_coder(0))
    model = Model(shapes, config, kernels, workers, partial(Gradients, device=device), small=False)
    model.accumulate(SETTLED if device != "cpu" else 3)
    return model


def models(device: str, runs: int, shapes_of: dict[str, Callable[[], Shapes]]) -> list[dict[str, Any]]:
    """A row for each model: floor, compress, decode of eight packets, the published flows, launches."""
    rows = []
    for name, shapes in shapes_of.items():
        say(f"timing {name}")
        rows.append(_model(name, shapes(), device, runs))
        if device != "cpu":
            torch.cuda.empty_cache()
    return rows


def _model(name: str, shapes: Shapes, device: str, runs: int) -> dict[str, Any]:
    worker = _worker(shapes, DGCConfig(density=DENSITY), device, WORKERS)
    numel = worker.numel
    speed = bandwidth(device, min(numel, 1 << 28), runs)
    host: list[tuple[float, float]] = []

    def compress() -> None:
        worker.compress()
        host.append((worker.launching, worker.waiting))

    row: dict[str, Any] = {
        "model": name, "numel": numel, "buckets": len(worker.engines), "bytes_per_second": speed,
        "floor_ms": 1e3 * BYTES * numel / speed,
        "compress": timed(compress, device, runs, before=worker.gradients.advance),
    }  # fmt: skip
    launching, waiting = zip(*host[-runs:], strict=True)
    row["host_launches_ms"], row["host_waits_ms"] = (1e3 * statistics.median(each) for each in (launching, waiting))
    row["launches"], row["busy_ms"] = _on_device(worker.compress, len(worker.engines), device)
    packets = [np.tile(message.payload, WORKERS) for message in worker.compress()]
    decode = partial(worker.receive, packets)
    row["decode"] = timed(decode, device, runs)
    row["decode_launches"], row["decode_busy_ms"] = _on_device(decode, len(worker.engines), device)
    if device != "cpu":
        pinned = [torch.from_numpy(packet).pin_memory().numpy() for packet in packets]
        row["decode_pinned"] = timed(partial(worker.receive, pinned), device, runs)
    numels = [(gradient.numel(),) for gradient in worker.gradients.arrays]
    for flow in FLOWS:
        baseline = flow(numels, DENSITY, MOMENTUM, device)
        action = partial(baseline.step, worker.gradients.arrays)
        row[flow.name] = timed(action, device, max(3, runs // 4), worker.gradients.advance)
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


def growth(device: str, runs: int, millions: Sequence[float]) -> list[dict[str, Any]]:
    """Picoseconds an element of one tensor of d elements at 0.1%, as the GaussianK paper measures it."""
    rows = []
    for size in millions:
        say(f"growth, {size:g} M")
        numel = int(size * 1e6)
        config = DGCConfig(density=DENSITY, bucket_bytes=4 * numel)
        worker = _worker([("weight", (1000, numel // 1000))], config, device)
        actions: dict[str, Callable[[], Any]] = {"ours": worker.compress}
        for flow in (PerTensorTopK, PublishedDGC, PublishedGaussianK):
            baseline = flow([(numel,)], DENSITY, MOMENTUM, device)
            actions[flow.name] = partial(baseline.step, worker.gradients.arrays)
        for name, action in actions.items():
            rows.append({"millions": size, "flow": name, **timed(action, device, runs, worker.gradients.advance)})
    return rows
