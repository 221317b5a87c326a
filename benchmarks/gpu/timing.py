"""Times on a device: compress against the floor that memory sets and against the published flows, and decode.

And whole steps of real models, with everything of an exchange but the network. Each model trains as users do it, with
mixed precision. A step is timed alone, in DistributedDataParallel with a hook that does nothing, and with this
package's hooks and a carrier that brings N copies of a rank's own messages at once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.baselines import FLOWS
from benchmarks.gpu import say
from benchmarks.gpu.page import STEP_WAYS
from benchmarks.kernels.bench import MOMENTUM, Advancing, Model
from benchmarks.quality.tasks import TransformerModel, tied_transformer
from benchmarks.shapes import Shapes, bert_large, gpt_1_3b, resnet50, vgg16
from benchmarks.timing import times, wall_clock
from dgc_horovod import DGCConfig
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.kernels import registry
from dgc_horovod.kernels.triton.kernels import TritonKernels
from dgc_horovod.torch.gradients.collectives import Collectives, Pending, ReduceSettings, Scales
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates import update_of

MODELS: dict[str, Callable[[], Shapes]] = {
    "ResNet-50": resnet50,
    "VGG-16": vgg16,
    "BERT-large": bert_large,
    "1.3 B": gpt_1_3b,
}
DENSITY, WORKERS = 0.001, 8
BYTES = 20  # that any step which keeps u and v must move for each element
SETTLED = 20  # steps until thresholds follow


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


def _worker(shapes: Shapes, config: DGCConfig, device: str, workers: int = 1) -> Model:
    """A rank over the tensors that are compressed, after steps in which its thresholds have settled."""
    kernels = TritonKernels(device, registry.host_coder(0))
    model = Model(shapes, config, kernels, workers, partial(Advancing, device=device), small=False)
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


DENSITIES = {"SGD": 0.001, "AdamW": 0.01}
WARMUP, TIMED, PROFILED = 2, 10, 2
_WAITS = ("Synchronize", "cudaMemcpy")  # calls in which the host waits for the device: not cudaMemcpyAsync

Step = Callable[[], None]


@dataclass(frozen=True)
class Trained:
    """A model and the way it is trained.

    Args:
        make_model: function that returns the model, on the host.
        make_batch: function of a device, of the arguments of `loss` after the model.
        loss: function of the model and a batch.
        optimizer: "SGD" (with momentum) or "AdamW".
    """

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[str], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    optimizer: str


class Echo(Collectives):
    """The collectives of one of N ranks whose messages are all equal: every result is there at once."""

    def allgather(self, packet: Tensor, name: str) -> Pending:
        return self._done(packet.repeat(self.workers), name)

    def alltoall(self, tensor: Tensor, name: str) -> Pending:
        return self._done(tensor.view(self.workers, -1)[self.rank].repeat(self.workers), name)

    def allreduce(self, tensor: Tensor, name: str, averages: bool = False, scales: Scales = (1.0, 1.0)) -> Pending:
        return self._done(tensor.mul_(scales[0] * scales[1] * (1 if averages else self.workers)), name)

    def broadcast(self, tensor: Tensor, name: str, root: int = 0) -> Pending:
        return self._done(tensor, name)

    def _done(self, result: Tensor, name: str) -> Pending:
        return Pending(None, result, name)

    def _is_done(self, handle: None) -> bool:
        return True

    def _result(self, pending: Pending) -> Tensor:
        raise AssertionError("no collective has a handle")


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model = BertForMaskedLM(config)
    for layer in model.bert.encoder.layer:
        layer.compile()
    return model  # type: ignore[no-any-return]


def _images(device: str) -> tuple[Tensor, ...]:
    images = torch.randn(64, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    return images, torch.randint(0, 1000, (64,), device=device)


def _tokens(samples: int, window: int, symbols: int) -> Callable[[str], tuple[Tensor, ...]]:
    return lambda device: (torch.randint(0, symbols, (samples, window), device=device),)


def _scores_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


TRAINED = {
    "ResNet-50, batch 64": Trained(
        _resnet50, _images, lambda model, x, y: functional.cross_entropy(model(x).float(), y), "SGD"
    ),
    "GPT of 124 M, 16 x 1,024": Trained(
        lambda: tied_transformer(50_304, 1024, 768, 12, compiles=True),
        _tokens(16, 1024, 50_257),
        _scores_loss,
        "AdamW",
    ),
    "BERT-large, 16 x 512": Trained(
        _bert, _tokens(16, 512, 30_522), lambda model, tokens: model(input_ids=tokens, labels=tokens).loss, "AdamW"
    ),
}
TINY_TRAINED = {
    "tiny": Trained(
        lambda: TransformerModel(97, 16), _tokens(2, 16, 97), _scores_loss, "AdamW"
    ),
}  # fmt: skip


def whole_steps(device: str, models: dict[str, Trained]) -> list[dict[str, Any]]:
    """A row for each model."""
    rows = []
    for name, trained in models.items():
        say(f"whole steps of {name}")
        row: dict[str, Any] = {"model": name, "optimizer": trained.optimizer}
        with _alone_in_a_group(device):
            for way, make in zip(STEP_WAYS, (_alone, _with_empty_hook, _compressed), strict=True):
                row[way] = _measured(make, trained, device)
                say(f"{name}, {way}: {row[way]}")
        rows.append(row)
    return rows


@contextmanager
def _alone_in_a_group(device: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _parts(trained: Trained, device: str) -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = trained.make_model().to(device)
    if trained.optimizer == "SGD":
        return model, torch.optim.SGD(model.parameters(), 0.01, 0.9), trained.make_batch(device)
    return model, torch.optim.AdamW(model.parameters(), 1e-5), trained.make_batch(device)


def _backward(trained: Trained, model: nn.Module, batch: tuple[Tensor, ...], device: str) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        loss = trained.loss(model, *batch)
    loss.backward()


def _alone(trained: Trained, device: str, around: Callable[[nn.Module], nn.Module] = lambda model: model) -> Step:
    inner, optimizer, batch = _parts(trained, device)
    model = around(inner)

    def step() -> None:
        optimizer.zero_grad()
        _backward(trained, model, batch, device)
        optimizer.step()

    return step


def _with_empty_hook(trained: Trained, device: str) -> Step:
    def around(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, noop_hook)
        return wrapped

    return _alone(trained, device, around)


def _compressed(trained: Trained, device: str) -> Step:
    model, optimizer, batch = _parts(trained, device)
    config = DGCConfig(density=DENSITIES[trained.optimizer])
    update, parameters = update_of(optimizer, config), dict(model.named_parameters())
    places, carriers = dict.fromkeys(parameters.values(), 0), {ALL: Echo(0, WORKERS, "echo")}
    exchange = GradientExchange(parameters, places, config, carriers, ReduceSettings(averages=True), lambda: 1.0)
    update.prepare(optimizer, exchange)
    results: dict[Tensor, Callable[[], Tensor]] = {}
    for p in parameters.values():
        p.register_post_accumulate_grad_hook(lambda p: results.update({p: exchange.take(p)}))
    group = optimizer.param_groups[0]

    def step() -> None:
        optimizer.zero_grad()
        exchange.begin_step(*update.entering(lambda p: group, optimizer.state, exchange))
        _backward(trained, model, batch, device)
        for p, result in results.items():
            p.grad = result()
        results.clear()
        if exchange.finish():
            update.step(optimizer, exchange, optimizer.step)
        exchange.clipping.step_ends()

    return step


def _measured(make: Callable[[Trained, str], Step], trained: Trained, device: str) -> dict[str, Any]:
    """Milliseconds of a step, the share of them in which the host waits for the device, and GiB of its memory."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step = make(trained, device)
    for _ in range(WARMUP if device == "cuda" else 0):  # beside those of `timed`
        step()
    found = timed(step, device, TIMED if device == "cuda" else 2)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {**found, "memory": memory, "waits": _waiting(step, device)}


def _waiting(step: Step, device: str) -> float | None:
    """The share of steps in which a call of the host waits for the device."""
    if device != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        for _ in range(PROFILED):
            step()
        whole = time.perf_counter() - start
        torch.cuda.synchronize()
    waits = [each for each in seen.key_averages() if each.key.endswith(_WAITS)]
    return sum(each.self_cpu_time_total for each in waits) / 1e6 / whole
