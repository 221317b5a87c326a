"""The memory of p.grad: the update is put together there, and whatever else uses that memory comes to no harm."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from dgc_horovod.torch.gradients.memory import is_alone
from tests.helpers.logs import messages
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
            compression = Compression.dgc(1.0, factor_masking=False, keep_gradients=False, **{**UNROUNDED, **fields})
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


class _StillNeeded(nn.Module):
    """The gradient of `a` lies in memory that the backward pass needs afterwards, for that of `b`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(64, 32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = self.b.sin()
        return torch.tanh(x @ (later + self.a.view(64, 32)).T)


def still_needed() -> dict[str, Any]:
    """Distance from plain torch where autograd goes on using the memory of a gradient; all ranks have the same data."""
    hvd.init()
    models = [_StillNeeded() for _ in range(2)]
    alone: dict[str, list[bool]] = {"a": [], "b": []}
    for name, p in models[0].named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: alone[name].append(is_alone(p.grad)))
    compression = Compression.dgc(1.0, factor_masking=False, bucket_bytes=8192, keep_gradients=False, **UNROUNDED)
    plain = momentum_sgd(models[1])
    ours = DistributedOptimizer(momentum_sgd(models[0]), models[0].named_parameters(), compression)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(8, 32, generator=generator)
        for model, optimizer in zip(models, (ours, plain), strict=True):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    return {"alone": alone, "distance": distance(weights(models[1]), weights(models[0]))}


def which_are_alone() -> list[bool]:
    """Of two parameters with one gradient, one whose gradient has a view, and one whose gradient the script holds."""
    parameters = [nn.Parameter(torch.zeros(8)) for _ in range(4)]
    parameters[0].grad = parameters[1].grad = torch.zeros(8)
    parameters[2].grad = torch.zeros(8)
    view = parameters[2].grad[:4]
    parameters[3].grad = torch.zeros(8)
    held = parameters[3].grad  # by the script, as the same tensor
    found = [is_alone(p.grad) for p in parameters if p.grad is not None]
    del view, held
    return found


def _in_place(p: Any) -> None:
    p.grad.add_(torch.randn_like(p))


def _by_data(p: Any) -> None:
    p.grad.data.add_(torch.randn_like(p))


def _by_numpy(p: Any) -> None:
    p.grad.numpy()[...] += 1 + hvd.rank()


def _then_replaced(p: Any) -> None:
    p.grad.add_(torch.randn_like(p))
    p.grad = p.grad.clone()


def late_writes() -> dict[str, Any]:
    """A rank's own noise, written into p.grad when it had been taken already, reaches no weight."""
    hvd.init()
    prints, zeros = {}, 0
    for write in (None, _in_place, _by_data, _by_numpy, _then_replaced):
        model = smooth_model()
        compression = Compression.dgc(0.05, keep_gradients=False)
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
        for x, y in batches(5, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in session(optimizer).exchange.compressed:
                zeros += not p.grad.any()  # as `compress` leaves them
                if write is not None:
                    write(p)
            optimizer.step()
        prints[write.__name__ if write else "none"] = fingerprint(model)
    return {"prints": prints, "zeros": int(zeros)}


def other_backend() -> dict[str, Any]:
    """Kernels that do not write into gradients: the same bits, and no word of a change that nobody has made."""
    hvd.init()
    prints = []
    with messages() as texts:
        for backend in ("native", "torch_eager"):
            os.environ["DGC_BACKEND"] = backend
            model = smooth_model()
            optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
            for x, y in batches(5, hvd.rank()):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            prints.append(fingerprint(model))
    del os.environ["DGC_BACKEND"]
    return {"same": prints[0] == prints[1], "told": [text for text in texts if "p.grad" in text]}
