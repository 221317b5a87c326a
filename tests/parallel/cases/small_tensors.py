"""Tensors that are not compressed: every way in which they can travel."""

from __future__ import annotations

import math
from typing import Any

import horovod.torch as hvd
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.logs import messages
from tests.helpers.training import batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights

WAYS = ("fp32", "fp16", "bf16", "8bit", "auto")


def every_way() -> dict[str, Any]:
    """30 steps in which nothing but the small tensors' values differs."""
    hvd.init()
    results: dict[str, Any] = {}
    exact = None
    for way in WAYS:
        model = smooth_model()
        compression = Compression.dgc(0.05, values="fp32", dense_values=way, clip_norm=1.0)
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
        losses = train(model, optimizer, steps=30)
        exact = exact if exact is not None else weights(model)
        results[way] = {
            "fingerprint": fingerprint(model),
            "distance": distance(exact, weights(model)),
            "losses": [sum(losses[:5]), sum(losses[-5:])],
            "sent": optimizer.compression_stats()["bytes_sent"],
        }
    return results


def nan_in_a_bias() -> dict[str, Any]:
    """Rank 1 has a NaN in the gradient of a bias, which travels in 8 bits: nobody steps, and training goes on."""
    hvd.init()
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    bad = [False]
    model[0].bias.register_hook(lambda g: g * math.nan if bad[0] else g)  # type: ignore[union-attr, operator]
    moved = []
    for step, (x, y) in enumerate(batches(6, hvd.rank())):
        before = weights(model).clone()
        bad[0] = step == 2 and hvd.rank() == 1
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        moved.append(float((weights(model) - before).norm()))
    return {"moved": moved, "fingerprint": fingerprint(model)}


def nothing_compressed() -> dict[str, Any]:
    """A model of small tensors only is told so, however they travel."""
    hvd.init()
    told = {}
    for way in ("fp32", "8bit"):
        with messages() as texts:
            model = nn.Linear(4, 4)
            compression = Compression.dgc(0.05, dense_values=way)
            DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
        told[way] = [text for text in texts if "NOTHING IS COMPRESSED" in text]
    return told
