"""A small training run, dense and compressed, of two processes that share one device.

Where Horovod is missing the transport of `dgc_horovod.torch.ddp` carries the packets; all of it is the product's.
``python -m benchmarks.gpu.training RANK WORKERS RENDEZVOUS DEVICE`` is one worker.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from dgc_horovod import DGCConfig, WarmupSchedule
from dgc_horovod.core.bucketing import TensorSpec
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.exchange.contract import ALL, start
from dgc_horovod.kernels.contract import ErrorFeedback, MomentumCorrection
from dgc_horovod.kernels.triton.kernels import TritonKernels
from dgc_horovod.stats import Traffic
from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, new_group

WORKERS, BATCH, INPUTS, CLASSES, RATE, MOMENTUM = 2, 64, 64, 10, 0.05, 0.9
STEPS, WIDTH = 400, 512
TINY_STEPS, TINY_WIDTH = 12, 24
TIMEOUT = 240  # seconds


class Compressed:
    """Exchange and step of a model: matrices compressed, the rest as Horovod would reduce it."""

    def __init__(self, model: nn.Module, device: str, transport: ProcessGroupCollectives, steps: int) -> None:
        self.transport, kernels = transport, TritonKernels(device)
        self.parameters = dict(model.named_parameters())
        warmup = WarmupSchedule(steps=steps // 5)
        self.exchange = OptimizerExchange(
            [TensorSpec(name, tuple(p.shape)) for name, p in self.parameters.items()],
            DGCConfig(density=0.01, warmup=warmup, dense_values="fp32"), lambda name: kernels, dist.get_rank(),
            dist.get_world_size(), True, Traffic(),
        )  # fmt: skip
        dense = [self.parameters[name] for name in self.exchange.layout.dense]
        self.dense, self.after = dense, torch.optim.SGD(dense, RATE, MOMENTUM)

    @torch.no_grad()
    def step(self) -> None:
        """From every rank's gradients to the same weights."""
        for engine in self.exchange.engines:
            gradients = [self.parameters[segment.name].grad for segment in engine.bucket.segments]
            accumulation = ErrorFeedback() if engine.bucket.uncompressed else MomentumCorrection(MOMENTUM)
            for i, gradient in enumerate(gradients):
                assert gradient is not None
                engine.add_gradient(i, gradient.view(-1), accumulation)
                engine.outputs.put(i, gradient.view(-1))
            message = self.exchange.compress(engine)
            buffer: np.ndarray | None = message.payload
            while buffer is not None:
                pending = start({ALL: self.transport}, engine.round, torch.from_numpy(buffer), engine.bucket.name)
                buffer = self.exchange.receive(engine, self.transport.wait(pending).numpy())
            self.exchange.aggregate(engine)
            for segment, gradient in zip(engine.bucket.segments, gradients, strict=True):
                self.parameters[segment.name].sub_(RATE * gradient)
        for p in self.dense:
            assert p.grad is not None
            p.grad.copy_(self.transport.wait(self.transport.allreduce(p.grad, "dense")) / self.transport.workers)
        self.after.step()
        self.exchange.close(True)


class Dense:
    """The same without compression."""

    def __init__(self, model: nn.Module, device: str, transport: ProcessGroupCollectives, steps: int) -> None:
        self.transport, self.model = transport, model
        self.optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)

    def step(self) -> None:
        """From every rank's gradients to the same weights."""
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad.copy_(self.transport.wait(self.transport.allreduce(p.grad, "dense")) / self.transport.workers)
        self.optimizer.step()


def _network(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


def trained(method: type[Any], device: str, steps: int, width: int) -> dict[str, Any]:
    """Accuracy after learning what another network says, and a hash of the weights."""
    model, teacher = _network(width, 0).to(device), _network(32, 1).to(device)
    worker = method(model, device, ProcessGroupCollectives(new_group(range(WORKERS), TIMEOUT), "study"), steps)
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(BATCH, INPUTS, generator=draw, device=device)
        model.zero_grad()
        cross_entropy(model(x), teacher(x).argmax(1)).backward()
        worker.step()
    with torch.no_grad():
        x = torch.randn(20_000, INPUTS, generator=torch.Generator(device).manual_seed(99), device=device)
        accuracy = (model(x).argmax(1) == teacher(x).argmax(1)).float().mean().item()
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return {"accuracy": accuracy, "weights": hashlib.sha256(bits).hexdigest()}


def study(device: str) -> dict[str, Any]:
    """Both runs on both workers; raises AssertionError if the replicas differ or a worker fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.training"]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(WORKERS), f"file://{folder}/rendezvous", device], stdout=subprocess.PIPE,
                text=True, cwd=Path(__file__).parents[2],
            )
            for rank in range(WORKERS)
        ]  # fmt: skip
        try:
            _wait_for(started)
        finally:
            for process in started:
                process.kill()
        said = [process.communicate()[0] for process in started]
    found = [json.loads(text.splitlines()[-1]) for text in said]
    for name in ("dense", "dgc"):
        assert len({each[name]["weights"] for each in found}) == 1, f"{name}: the replicas differ"
    return {name: found[0][name]["accuracy"] for name in ("dense", "dgc")}


def _wait_for(started: list[subprocess.Popen[str]]) -> None:
    """Until all have ended well; the first that has not is an error at once, though others wait for it."""
    deadline = time.monotonic() + TIMEOUT
    while None in (codes := [process.poll() for process in started]) and not any(codes):
        assert time.monotonic() < deadline, f"the workers have not ended within {TIMEOUT} s"
        time.sleep(0.1)
    assert not any(codes), f"a worker has ended with exit code {next(filter(None, codes))}; its error stands above"


def main() -> None:
    """Be one worker."""
    rank, workers, rendezvous, device = sys.argv[1:]
    dist.init_process_group("gloo", rendezvous, rank=int(rank), world_size=int(workers))
    steps, width = (TINY_STEPS, TINY_WIDTH) if device == "cpu" else (STEPS, WIDTH)
    found = {name: trained(method, device, steps, width) for name, method in (("dense", Dense), ("dgc", Compressed))}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
