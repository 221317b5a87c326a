"""Scripts that change a step, its gradients, parameter groups or the optimizer's methods, beside stock Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.training import batches, fingerprint, momentum_sgd, smooth_model, weights

WAYS = ("stock", "dense", "sparse")
_DENSE = {"values": "fp32", "dense_values": "fp32", "factor_masking": False, "min_numel": 16}


def _wrapped(way: str, make: Callable[[nn.Module], torch.optim.Optimizer] = momentum_sgd) -> tuple[nn.Module, Any]:
    hvd.init()
    model = smooth_model()
    if way == "stock":
        return model, hvd.DistributedOptimizer(make(model), model.named_parameters())
    compression = Compression.dgc(1.0, **_DENSE) if way == "dense" else Compression.dgc(0.1, min_numel=16)
    return model, DistributedOptimizer(make(model), model.named_parameters(), compression)


def _told(optimizer: Any) -> list[str]:
    return sorted(session(optimizer).told) if hasattr(optimizer, "compression_stats") else []


def taken_away() -> dict[str, Any]:
    """How far a layer moves at each step after 12 in which the script has set its gradients to None before step()."""
    found: dict[str, Any] = {}
    for way in ("stock", "sparse"):
        model, optimizer = _wrapped(way)
        layer, moves = model[2], []  # type: ignore[index]
        for i, (x, y) in enumerate(batches(16, hvd.rank())):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.synchronize()
            if i < 12:
                layer.weight.grad = None
            before = layer.weight.detach().clone()
            with optimizer.skip_synchronize():
                optimizer.step()
            moves.append(float((layer.weight.detach() - before).norm()))
        found[way] = {"moves": moves, "told": _told(optimizer), "is": fingerprint(model)}
    return found


def dropped_update() -> list[str]:
    """What is told where an update is dropped that was exchanged."""
    model, optimizer = _wrapped("sparse")
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    return _told(optimizer)


def updates_left() -> dict[str, Any]:
    """Updates that no step has applied when the next backward pass comes: errors, what is told, distance to stock."""
    found, stock = {}, {}
    for way in ("stock", "feedback", "momentum"):
        for what in ("none", "added to", "dropped by the model"):
            model, optimizer = _wrapped("stock" if way == "stock" else "dense")
            if way == "feedback":
                plain = Compression.topk(1.0, values="fp32", dense_values="fp32", min_numel=16)
                optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), plain)

            def train(what: str = what, model: nn.Module = model, optimizer: Any = optimizer) -> None:
                for x, y in batches(3, hvd.rank()):
                    optimizer.synchronize()  # the first time with gradients of zeros
                    optimizer.zero_grad()
                    if what != "none":
                        F.mse_loss(model(x), -y).backward()
                        optimizer.synchronize()
                    if what == "dropped by the model":
                        model.zero_grad()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()

            error, end = error_of(train), weights(model)
            distance = float((end - stock.setdefault(what, end)).norm() / end.norm())
            found[f"{what}, {way}"] = {"error": error, "told": _told(optimizer), "distance": distance}
    return found


def late_hooks() -> list[list[str]]:
    """What is told of a hook that comes after the wrapping, and of one from before."""
    told = []
    for late in (True, False):
        hvd.init()
        model = smooth_model()
        if not late:
            model[0].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[index]
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))
        if late:
            model[0].weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[index]
        for x, y in batches(2, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        told.append(_told(optimizer))
    return told


def _in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "momentum": 0.0}, {"params": others, "momentum": 0.9, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05)


def _reverse(optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def _merge(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"] += first["params"]
    optimizer.param_groups[:] = [second]


def _leave_out(optimizer: Any) -> None:
    left = optimizer.param_groups[1]["params"]
    left[-1].requires_grad_(False)  # a frozen one, as scripts do
    optimizer.param_groups[1]["params"] = left[:-2]


def regrouped() -> dict[str, float]:
    """Largest difference to stock Horovod's weights where groups change their order, or one takes in the other."""
    found = {}
    for name, change in {"reversed": _reverse, "merged": _merge, "left out": _leave_out}.items():
        ends = []
        for way in ("stock", "dense"):
            model, optimizer = _wrapped(way, _in_two_groups)
            for i, (x, y) in enumerate(batches(6, hvd.rank())):
                if i == 2:
                    change(optimizer)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            ends.append(weights(model))
        found[name] = float((ends[0] - ends[1]).abs().max())
    return found


class _Own(torch.optim.SGD):
    """Methods with arguments and results of their own."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()

    def state_dict(self, light: bool = False) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "light": light}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.strict = strict

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        super().step()
        return "done"


def own_methods() -> dict[str, list[Any]]:
    """What an optimizer's own methods are given and return."""
    found = {}
    for way in WAYS:
        model, optimizer = _wrapped(way, lambda model: _Own(model.parameters(), lr=0.05, momentum=0.9))
        x, y = next(iter(batches(1, hvd.rank())))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        returned = optimizer.step()
        saved = optimizer.state_dict(light=True)
        optimizer.load_state_dict(saved, strict=False)
        found[way] = [returned, saved["light"], optimizer.strict]
    return found
