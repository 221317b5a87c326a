"""A small training run, dense and compressed, of two processes that share one device.

The packets travel over Gloo, by `dgc_horovod.torch.ddp`, which needs no Horovod.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod import WarmupSchedule
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
        warmup = WarmupSchedule(steps=steps // 5)
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
