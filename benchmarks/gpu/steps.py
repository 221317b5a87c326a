"""Whole steps of real models on a device, with everything of an exchange but the network.

Each model trains as users do it, with mixed precision. A step is timed alone, in DistributedDataParallel with a hook
that does nothing, and with this package's hooks and a carrier that brings N copies of a rank's own messages at once.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import say
from benchmarks.gpu.page import STEP_WAYS
from benchmarks.gpu.timing import timed
from benchmarks.quality.tasks import TransformerModel, tied_transformer
from dgc_horovod import DGCConfig
from dgc_horovod.exchange.contract import ALL
from dgc_horovod.torch.gradients.collectives import Collectives, Pending, ReduceSettings, Scales
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.updates import update_of

WORKERS, DENSITIES = 8, {"SGD": 0.001, "AdamW": 0.01}
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


MODELS = {
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
TINY = {
    "tiny": Trained(
        lambda: TransformerModel(97, 16), _tokens(2, 16, 97), _scores_loss, "AdamW"
    ),
}  # fmt: skip


def study(device: str, models: dict[str, Trained]) -> list[dict[str, Any]]:
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
