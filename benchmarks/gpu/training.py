"""Training of two processes that share one device.

A small run, dense and compressed, by `dgc_horovod.torch.ddp` over Gloo, which needs no Horovod; and the PyTorch adapter
on real Horovod ranks, whose weights are those of ranks on the CPU, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dgc_horovod.torch as dgc  # Horovod is imported by the first of its names that needs it
from benchmarks.gpu import say
from dgc_horovod.kernels import registry
from dgc_horovod.torch import ddp

WORKERS, BATCH, INPUTS, CLASSES, RATE, MOMENTUM = 2, 64, 64, 10, 0.05, 0.9
STEPS, WIDTH = 400, 512
TINY_STEPS, TINY_WIDTH = 12, 24


def _network(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    )


def trained(name: str, device: str, steps: int, width: int) -> dict[str, Any]:
    """Accuracy after learning what another network says, and a hash of the weights."""
    model, teacher = DistributedDataParallel(_network(width, 0).to(device)), _network(32, 1).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    if name == "dgc":
        warmup = dgc.WarmupSchedule(steps=steps // 5)
        optimizer = ddp.register(model, optimizer, ddp.Compression.dgc(0.01, warmup=warmup, dense_values="fp32"))
    draw = torch.Generator(device).manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(BATCH, INPUTS, generator=draw, device=device)
        optimizer.zero_grad()
        cross_entropy(model(x), teacher(x).argmax(1)).backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randn(20_000, INPUTS, generator=torch.Generator(device).manual_seed(99), device=device)
        accuracy = (model(x).argmax(1) == teacher(x).argmax(1)).float().mean().item()
    bits = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return {"accuracy": accuracy, "weights": hashlib.sha256(bits).hexdigest()}


def worker(rank: int, folder: str, device: str) -> None:
    """Be one worker; what it has found goes into a file of the folder."""
    if device == "cpu":  # under the interpreter
        os.environ["DGC_BACKEND"] = "triton"
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORKERS)
    steps, width = (TINY_STEPS, TINY_WIDTH) if device == "cpu" else (STEPS, WIDTH)
    found = {name: trained(name, device, steps, width) for name in ("dense", "dgc")}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def study(device: str) -> dict[str, Any]:
    """Both runs on both workers; an error if the replicas differ or a worker fails, which ends the other."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (folder, device), WORKERS)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORKERS)]
    for name in ("dense", "dgc"):
        assert len({each[name]["weights"] for each in found}) == 1, f"{name}: the replicas differ"
    return {name: found[0][name]["accuracy"] for name in ("dense", "dgc")}


ADAPTER_STEPS, TIMEOUT = 8, 120  # seconds
SHAPES = ((300, 41), (1000,), (64, 3, 7, 7), (5,), (40_961,))
SMALL_SHAPES = ((30, 41), (63,), (5,))
# Powers of two: their products are exact, so it does not show that a GPU's own optimizer fuses them with a sum.
ADAPTER_RATE, ADAPTER_MOMENTUM = 2**-5, 0.5


def _compressions() -> dict[str, Any]:
    density = {"density": 0.05, "min_numel": 16}
    return {
        "dgc": dgc.Compression.dgc(**density),
        "clipped, 4bit": dgc.Compression.dgc(**density, clip_norm=0.5, values="4bit"),
        "gaussian": dgc.Compression.gaussian(**density),
        "local steps": dgc.Compression.local(steps=2, **density),
        "local steps, offload": dgc.Compression.local(steps=2, **density, offload=True),
    }


def weights_after(compression: Any, device: str, shapes: tuple[tuple[int, ...], ...], rank: int) -> str:
    """A hash of the weights after some steps, whose gradients are the same numbers on every device."""
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw).to(device)) for shape in shapes]
    sgd = torch.optim.SGD(parameters, ADAPTER_RATE, ADAPTER_MOMENTUM)
    optimizer = dgc.DistributedOptimizer(sgd, [(str(i), p) for i, p in enumerate(parameters)], compression)
    for step in range(ADAPTER_STEPS):
        optimizer.zero_grad()
        draw.manual_seed(1000 * step + rank)
        factors = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
        sum((p * factor).sum() for p, factor in zip(parameters, factors, strict=True)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)).hexdigest()


def adapter(device: str) -> dict[str, str]:
    """The error of each kind of compression, "" if there is none; empty where there is no Horovod."""
    if find_spec("horovod") is None:
        say("Horovod is not installed: its adapter is not run (scripts/build_horovod)")
        return {}
    from benchmarks.ranks import launch  # needs psutil, which comes with Horovod

    found = launch("benchmarks.gpu.training:rank", device, WORKERS, None, TIMEOUT)
    verdicts = {name: _verdict([rank[name] for rank in found]) for name in found[0]}
    for name, wrong in verdicts.items():
        say(f"on Horovod's ranks, {name}: {wrong or 'ok'}")
    return verdicts


def _verdict(ranks: list[dict[str, str]]) -> str:
    if any(rank != ranks[0] for rank in ranks):
        return "the replicas differ"
    return "" if len(set(ranks[0].values())) == 1 else "the weights differ from those of the CPU's kernels"


def rank(device: str) -> dict[str, dict[str, str]]:
    """The hashes of one rank, by kind of compression and place."""
    import horovod.torch as hvd

    hvd.init()
    interpreted = device == "cpu"
    assert interpreted or registry.choose(device).name == "triton", "the log says why Triton does not run"
    # under the interpreter both are on the CPU, and only the backend tells them apart
    runs = [("cpu", "native"), ("cpu", "triton")] if interpreted else [("cpu", "auto"), (device, "auto")]
    shapes = SMALL_SHAPES if interpreted else SHAPES
    found: dict[str, dict[str, str]] = {name: {} for name in _compressions()}
    for name, compression in _compressions().items():
        for place, backend in runs:
            os.environ["DGC_BACKEND"] = backend
            found[name][f"{place}, {backend}"] = weights_after(compression, place, shapes, hvd.rank())
    hvd.shutdown()
    return found
