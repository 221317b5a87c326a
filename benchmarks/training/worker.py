"""One rank of a launch: a task trained with one method after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from benchmarks import connections
from benchmarks.training.tasks import COMPRESSED, NO_OP, TASKS, Task, digest, whole_steps
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule

MOMENTUM = 0.9
EXACT_LOSSES = 20  # so many are kept to the last bit, to be compared with those of another run


def learning_rate(warmup: int, steps: int) -> Callable[[int], float]:
    """Step -> factor of the highest learning rate: a linear rise, then a cosine to 0."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor


def make_optimizer(task: Task, method: str) -> Any:
    """SGD with momentum, wrapped for the method's exchange; the model's weights are rank 0's."""
    settings = task.settings
    optimizer: Any = torch.optim.SGD(task.model.parameters(), lr=settings.lr, momentum=MOMENTUM)
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    if method == NO_OP:
        return optimizer
    compression = Compression.fp16 if method == "fp16" else Compression.none
    if method in COMPRESSED:
        compression = Compression.dgc(
            density=settings.density,
            rule="gaussian" if method == "gaussian" else "exact",
            clip_norm=settings.clip_norm,
            warmup=WarmupSchedule(steps=settings.density_warmup),
        )
    return DistributedOptimizer(optimizer, named_parameters=task.model.named_parameters(), compression=compression)


def train_step(task: Task, method: str, optimizer: Any) -> float:
    """One step as a user's script has it; its loss."""
    clip_norm = task.settings.clip_norm
    optimizer.zero_grad()
    loss = task.loss()
    loss.backward()
    if clip_norm is None or method in COMPRESSED:  # these clip on the way
        optimizer.step()
    elif method == NO_OP:
        nn.utils.clip_grad_norm_(task.model.parameters(), clip_norm)
        optimizer.step()
    else:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(task.model.parameters(), clip_norm)
        with optimizer.skip_synchronize():
            optimizer.step()
    return loss.item()


def train(task: Task, method: str, steps: int) -> dict[str, Any]:
    """The first steps of a run.

    Args:
        task: what to train.
        method: what is exchanged.
        steps: how many steps; the learning-rate schedule has the method's own length all the same.

    Returns:
        ``milliseconds`` of each step and ``losses`` of the first ones on this rank, ``curve`` of [steps, seconds
        without evaluations, quality, loss], ``digest`` of the last weights, whether the ``replicas`` have the same,
        ``parameters``, ``batch`` per rank and bytes ``sent`` and ``received``, beside those of fp32, on this rank.
    """
    settings, optimizer = task.settings, make_optimizer(task, method)
    factor = learning_rate(settings.lr_warmup, whole_steps(type(task), method))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    times, losses, curve = [], [], []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        losses.append(train_step(task, method, optimizer))
        schedule.step()
        times.append(time.perf_counter() - start)
        if method != NO_OP and (step % settings.evaluate_every == 0 or step == steps):
            quality = hvd.allreduce(torch.tensor(task.quality(), dtype=torch.float64), name="quality").item()
            curve.append([step, round(sum(times), 4), round(quality, 4), round(losses[-1], 4)])
    weights = digest(task.model.parameters())
    return {
        "milliseconds": [round(1e3 * seconds, 2) for seconds in times],
        "losses": losses[:EXACT_LOSSES],
        "curve": curve,
        "digest": weights,
        "replicas": len(set(hvd.allgather_object(weights))) == 1,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "batch": settings.batch,
        **traffic(task, method, optimizer, steps),
    }


def traffic(task: Task, method: str, optimizer: Any, steps: int) -> dict[str, int]:
    """Bytes that this rank has handed to collectives and received from them, and those of fp32 gradients."""
    if method in COMPRESSED:
        stats = optimizer.compression_stats()
        names = {"sent": "bytes_sent", "received": "bytes_received"}
        dense = {"sent_fp32": "bytes_dense", "received_fp32": "bytes_dense_received"}
        return {ours: int(stats[name]) for ours, name in {**names, **dense}.items()}
    # Stock Horovod keeps no count: every gradient is handed over once a step; a ring passes 2(N-1)/N of it on.
    full = 4 * steps * sum(p.numel() for p in task.model.parameters())
    sent = {"dense": full, "fp16": full // 2, NO_OP: 0}[method]
    ring = 2 * (task.size - 1) / task.size
    return {"sent": sent, "received": int(ring * sent), "sent_fp32": full, "received_fp32": int(ring * full)}


def rank(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train with every method of the order; each has connections of its own."""
    torch.set_flush_denormal(True)  # a run that diverges would take several times as long
    connections.start()
    found = []
    for method, steps in order["methods"]:
        task = TASKS[order["task"]](hvd.rank(), hvd.size(), order["seed"])  # each starts from the same weights and data
        found.append(train(task, method, steps))
        connections.renew()
    hvd.shutdown()
    return found
