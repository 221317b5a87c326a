"""The PyTorch adapter on real Horovod ranks that share one device: the weights of ranks on the CPU, bit for bit."""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from typing import Any

import torch

import dgc_horovod.torch as dgc  # Horovod is imported by the first of its names that needs it
from benchmarks.gpu import say
from dgc_horovod.kernels import registry

WORKERS = 2
STEPS, TIMEOUT = 8, 120  # seconds
SHAPES = ((300, 41), (1000,), (64, 3, 7, 7), (5,), (40_961,))
SMALL_SHAPES = ((30, 41), (63,), (5,))
# Powers of two: their products are exact, so it does not show that a GPU's own optimizer fuses them with a sum.
RATE, MOMENTUM = 2**-5, 0.5


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
    sgd = torch.optim.SGD(parameters, RATE, MOMENTUM)
    optimizer = dgc.DistributedOptimizer(sgd, [(str(i), p) for i, p in enumerate(parameters)], compression)
    for step in range(STEPS):
        optimizer.zero_grad()
        draw.manual_seed(1000 * step + rank)
        factors = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
        sum((p * factor).sum() for p, factor in zip(parameters, factors, strict=True)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)).hexdigest()


def check(device: str) -> dict[str, str]:
    """The error of each kind of compression, "" if there is none; empty where there is no Horovod."""
    if find_spec("horovod") is None:
        say("Horovod is not installed: its adapter is not run (scripts/build_horovod)")
        return {}
    from benchmarks.ranks import launch  # needs psutil, which comes with Horovod

    found = launch("benchmarks.gpu.adapter:rank", device, WORKERS, None, TIMEOUT)
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
