"""The memory of p.grad: the update is put together there, and whatever else uses that memory comes to no harm."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.regression import SharedGradients
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, weights


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
            "held": sum(len(run.outputs) for run in session(optimizer).exchange.runs),
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


def shared_gradient_memory() -> dict[str, Any]:
    """Distance from stock Horovod where gradients share memory, and a parameter has no elements."""
    hvd.init()
    results: dict[str, Any] = {}
    stock = None
    for way in ("stock", "fp32", "8bit", "two buckets"):
        model = SharedGradients()
        if way == "stock":
            optimizer = hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters())
        else:
            fields: dict[str, Any] = {"bucket_bytes": 8192} if way == "two buckets" else {"dense_values": way}
            compression = Compression.dgc(1.0, factor_masking=False, **{**UNROUNDED, **fields})
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


def _in_place(p: Any) -> None:
    p.grad.add_(torch.randn_like(p))


def _by_data(p: Any) -> None:
    p.grad.data.add_(torch.randn_like(p))


def _by_numpy(p: Any) -> None:
    p.grad.numpy()[...] += 1 + hvd.rank()


def _then_replaced(p: Any) -> None:
    p.grad.add_(torch.randn_like(p))
    p.grad = p.grad.clone()


def late_writes() -> dict[str, str]:
    """A rank's own noise, written into p.grad when it had been taken already, reaches no weight."""
    hvd.init()
    prints = {}
    for write in (None, _in_place, _by_data, _by_numpy, _then_replaced):
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
        for x, y in batches(5, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in session(optimizer).exchange.sparse if write is not None else ():
                write(p)
            optimizer.step()
        prints[write.__name__ if write else "none"] = fingerprint(model)
    return prints
