"""Whether the second moment of a torch optimizer has settled: measured by the first rank, told to all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from dgc_horovod.torch.updates.base import Parameter


def watch(optimizer: Any) -> None:
    """After a step that every rank has applied, and that no rank is in join for: look whether dense steps may end.

    Cost: in every tenth dense step a read of the second moments on the first rank, and a broadcast of 40 bytes.
    """
    exchange, collectives = optimizer._dgc, optimizer._dgc.collectives
    settling, steps = exchange.buckets.settling, exchange.buckets.steps
    if not (optimizer._dgc_update.dense and settling.is_due(steps)):
        return
    judged = settling.judge(*measured(optimizer, exchange.compressed)) if collectives.rank == 0 else [0.0] * 5
    told = collectives.broadcast(torch.tensor(judged, dtype=torch.float64), "settled")
    settling.take(collectives.wait(told).tolist(), steps)


def measured(optimizer: torch.optim.Optimizer, compressed: Collection[Parameter]) -> tuple[int, float, float, float]:
    """Adam's step, the l1 norm of its second moment, its learning rate and ``1/(1-b2)``, of the compressed tensors.

    Of several groups the highest of each.
    """
    states, chosen = [optimizer.state[p] for p in compressed], set(compressed)
    groups = [group for group in optimizer.param_groups if not chosen.isdisjoint(group["params"])]
    norms = [state["exp_avg_sq"].sum(dtype=torch.float64) for state in states]
    return (
        max(int(state["step"]) for state in states),
        sum(float(norm) for norm in norms),
        max(float(group["lr"]) for group in groups),
        max(1 / (1 - float(group["betas"][1])) for group in groups),
    )
