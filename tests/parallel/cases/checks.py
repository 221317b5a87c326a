"""Replicas that drift apart are found out, on real ranks."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.errors import ReplicaMismatch
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import fingerprint, momentum_sgd, smooth_model, train


def _made(**fields: Any) -> tuple[Any, Any]:
    model = smooth_model()
    compression = Compression.dgc(0.05, min_numel=16, **fields)
    return model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)


def drifting() -> dict[str, Any]:
    """One rank's weights are changed behind the others' backs."""
    hvd.init()
    found: dict[str, Any] = {}
    for action in ("stop", "broadcast"):
        model, optimizer = _made(check_every=4, on_mismatch=action)
        steps = []

        def spoil(step: int, model: Any = model, steps: list[int] = steps) -> None:
            steps.append(step)
            if step == 6 and hvd.rank() == 1:
                with torch.no_grad():
                    model[2].weight[3, 4] += 1e-6

        try:
            train(model, optimizer, 12, after_step=spoil)
            found[action] = {"fingerprint": fingerprint(model), "steps": len(steps)}
        except ReplicaMismatch as error:
            found[action] = {"error": str(error), "steps": len(steps)}
    return found


def sound() -> dict[str, Any]:
    """Nothing is found where nothing is wrong; what it costs; and that it can be switched off."""
    hvd.init()
    found = {}
    for every in (0, 1):
        model, optimizer = _made(check_every=every)
        train(model, optimizer, 10)
        found[str(every)] = {"fingerprint": fingerprint(model), "sent": optimizer.compression_stats()["bytes_sent"]}
    return found


def other_weights_from_the_start() -> dict[str, Any]:
    """Nobody has broadcast the weights."""
    hvd.init()
    model = smooth_model(seed=hvd.rank())
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    try:
        train(model, optimizer, 5)
    except ReplicaMismatch as error:
        return {"error": str(error)}
    return {"error": ""}
