"""Tensors that are not compressed: every way in which they can travel, and p.grad as the place of the update."""

from __future__ import annotations

import math
from typing import Any

import horovod.torch as hvd
import torch
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


def update_in_place() -> dict[str, Any]:
    """The update is put together in the gradient's own memory; where that does not fit, beside it."""
    hvd.init()
    torch.manual_seed(0)
    results = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
        model(torch.randn(4, 32, dtype=dtype)).pow(2).sum().backward()
        places = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        after = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
        results[name] = {
            "in place": places == after,
            "held": sum(len(run.targets) for run in optimizer._dgc._runs),
        }
    return results


def replaced_gradients() -> dict[str, Any]:
    """A script that puts another tensor into p.grad between backward and step still gets the update there."""
    hvd.init()
    prints = []
    for replace in (False, True):
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
        for x, y in batches(5, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if replace:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad = p.grad.clone()
            optimizer.step()
        prints.append(fingerprint(model))
    return {"same": prints[0] == prints[1], "fingerprint": prints[1]}


class _Sum(nn.Module):
    """Views of two parameters are added, so autograd gives both gradients one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(64, 32)) for _ in range(2))
        self.c, self.d = (nn.Parameter(torch.randn(32)) for _ in range(2))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.a.unsqueeze(0) + self.b.unsqueeze(0)
        return torch.tanh(x @ both[0].T + 0.0) @ both[0] + (self.c.view(1, 32) + self.d.view(1, 32))


def shared_gradient_memory() -> dict[str, Any]:
    """Distance from stock Horovod where gradients share memory, and a parameter has no elements."""
    hvd.init()
    results: dict[str, Any] = {}
    stock = None
    for way in ("stock", "fp32", "8bit"):
        model = _Sum()
        if way == "stock":
            optimizer = hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters())
        else:
            compression = Compression.dgc(1.0, factor_masking=False, values="fp32", dense_values=way)
            optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 32, generator=generator)).pow(2).mean().backward()
            shared = model.a.grad.data_ptr() == model.b.grad.data_ptr()  # type: ignore[union-attr]
            optimizer.step()
        stock = weights(model) if stock is None else stock
        results[way] = {
            "distance": distance(stock, weights(model)),
            "fingerprint": fingerprint(model),
            "shared": shared,
        }
    return results


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
