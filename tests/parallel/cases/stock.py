"""At density 1 with fp32 values and no masking we are stock Horovod: every argument, every SGD option."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import UNROUNDED, batches, distance, smooth_model, train, weights

Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]


def everything(**fields: Any) -> Any:
    """The compression that loses nothing: density 1, no masking, fp32."""
    return Compression.dgc(1.0, factor_masking=False, min_numel=1, **{**UNROUNDED, **fields})


def _ours(**arguments: Any) -> Wrap:
    compression = arguments.pop("compression", None) or everything()
    return lambda optimizer, model: DistributedOptimizer(optimizer, model.named_parameters(), compression, **arguments)


def _stock(**arguments: Any) -> Wrap:
    return lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)


def _sgd(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model[:2].parameters()), "momentum": 0.5, "nesterov": False},
        {"params": list(model[2:].parameters()), "weight_decay": 1e-2, "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def _compare(make: Callable[[nn.Module], torch.optim.Optimizer], ours: Wrap, stock: Wrap, **training: Any) -> float:
    results = []
    for wrap in (stock, ours):
        model = smooth_model()
        optimizer = wrap(make(model), model)
        after = training.get("after", lambda optimizer: lambda step: None)(optimizer)
        train(model, optimizer, training.get("steps", 20), training.get("passes", 1), after_step=after)
        results.append(weights(model))
    return distance(*results)


def _momentum_by_schedule(optimizer: Any) -> Callable[[int], None]:
    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.5 + 0.02 * step

    return change


def _one_cycle(optimizer: Any) -> Callable[[int], None]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=25)
    return lambda step: scheduler.step()


def sgd_options() -> dict[str, float]:
    """Distance from stock Horovod + SGD after 20 steps, for each option of SGD."""
    hvd.init()
    return {
        "plain": _compare(_sgd(momentum=0), _ours(), _stock()),
        "momentum": _compare(_sgd(), _ours(), _stock()),
        "nesterov": _compare(_sgd(nesterov=True), _ours(), _stock()),
        "weight decay": _compare(_sgd(weight_decay=1e-2), _ours(), _stock()),
        "nesterov, weight decay": _compare(_sgd(nesterov=True, weight_decay=1e-2), _ours(), _stock()),
        "maximize": _compare(_sgd(maximize=True, lr=1e-3, weight_decay=1e-2), _ours(), _stock()),
        "foreach": _compare(_sgd(foreach=True, nesterov=True), _ours(), _stock()),
        "two groups": _compare(_two_groups, _ours(), _stock()),
        "momentum by schedule": _compare(_sgd(), _ours(), _stock(), after=_momentum_by_schedule),
        "OneCycleLR": _compare(_sgd(), _ours(), _stock(), after=_one_cycle),
        "tensor scope, 1-D too": _compare(
            _sgd(), _ours(compression=everything(scope="tensor", compress_1d=True, bucket_bytes=4096)), _stock()
        ),
        "compression none": _compare(_sgd(), _ours(compression=Compression.none), _stock()),
        "compression fp16": _compare(
            _sgd(), _ours(compression=Compression.fp16), _stock(compression=hvd.Compression.fp16)
        ),
        "topk preset": _compare(
            _sgd(weight_decay=1e-2), _ours(compression=Compression.topk(1.0, **UNROUNDED)), _stock()
        ),
        "wrong on purpose": _compare(_sgd(), _ours(compression=Compression.dgc(0.01)), _stock()),
    }


def arguments() -> dict[str, float]:
    """Distance from stock with the same argument, for each argument of the signature."""
    hvd.init()
    last = lambda model: [list(model[4:].parameters())]  # noqa: E731
    model_groups = lambda factory: lambda o, m: factory(groups=last(m))(o, m)  # noqa: E731
    same = lambda **a: (_ours(**a), _stock(**a))  # noqa: E731
    return {
        "backward_passes_per_step": _compare(_sgd(), *same(backward_passes_per_step=3), passes=3),
        "op=Sum": _compare(_sgd(lr=0.02), *same(op=hvd.Sum)),
        "predivide": _compare(_sgd(), *same(gradient_predivide_factor=2.0)),
        "num_groups": _compare(_sgd(), *same(num_groups=2)),
        "groups=3": _compare(_sgd(), *same(groups=3)),
        "groups=list": _compare(_sgd(), model_groups(_ours), model_groups(_stock)),
        "sum is not mean": _compare(_sgd(lr=0.02), _ours(), _stock(op=hvd.Sum)),
    }


def resumed_from_stock() -> dict[str, float]:
    """Ten steps of stock Horovod, then ten more from its state: with stock, with ours loaded, with ours wrapped."""
    hvd.init()
    results = {}
    for name, make in {"SGD": _sgd(weight_decay=1e-2, nesterov=True), "SGD without decay": _sgd()}.items():
        model = smooth_model()
        optimizer = _stock()(make(model), model)
        train(model, optimizer, 10)
        start, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 10)
        for way in ("loaded", "wrapped"):
            again = smooth_model()
            again.load_state_dict(start)
            own = make(again)
            if way == "wrapped":
                own.load_state_dict(copy.deepcopy(state))
            resumed = _ours()(own, again)
            if way == "loaded":
                resumed.load_state_dict(copy.deepcopy(state))
            train(again, resumed, 10)
            results[f"{name}, {way}"] = distance(weights(model), weights(again))
    return results


def adam_from_stock() -> dict[str, float]:
    """One rank's stock Adam state, loaded: the engine takes over moments and step count."""
    hvd.init()
    model = smooth_model()
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    same_data = list(batches(20, rank=0))

    def steps(model: nn.Module, optimizer: Any, data: list[Any]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    steps(model, adam, same_data[:10])
    again = smooth_model()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = DistributedOptimizer(
        torch.optim.AdamW(again.parameters(), lr=3e-3), again.named_parameters(), everything()
    )
    resumed.load_state_dict(copy.deepcopy(adam.state_dict()))
    steps(model, adam, same_data[10:])
    steps(again, resumed, same_data[10:])
    return {"distance": distance(weights(model), weights(again))}


def frozen_half_way() -> dict[str, float]:
    """A parameter frozen after step 10: as stock; and under real compression its residual drains."""
    hvd.init()
    results = []
    for wrap in (_stock(), _ours()):
        model = smooth_model()
        optimizer = wrap(_sgd()(model), model)
        train(model, optimizer, 20, before_backward=lambda step, m=model: m[0].weight.requires_grad_(step < 10))
        results.append(weights(model))

    model = smooth_model()
    optimizer = DistributedOptimizer(
        _sgd(lr=1e-3)(model), model.named_parameters(), Compression.dgc(0.05, scope="tensor", min_numel=1)
    )
    norms = {}
    for step, (x, y) in enumerate(batches(80, hvd.rank())):
        model[0].weight.requires_grad_(step < 10)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        arrays = optimizer.residual_state_dict()["tensors"]["0.weight"]
        # on nodes a rank may have no slice of a tensor, and no u
        norms[step] = sum(float((arrays[part] ** 2).sum()) for part in ("v", "u") if part in arrays)
    return {"distance": distance(*results), "norm at 9": norms[9], "norm at 79": norms[79]}


def adamw() -> float:
    """AdamW at density 1 is stock's."""
    hvd.init()
    return _compare(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3), _ours(), _stock())


def sparse_embedding() -> dict[str, Any]:
    """``sparse_as_dense=True`` is compressed and equals stock; without it a clear error."""
    hvd.init()

    def run(wrap: Wrap) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(200, 16, sparse=True, mode="sum"), nn.Linear(16, 1))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
        generator = torch.Generator().manual_seed(hvd.rank())
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randint(0, 200, (8, 5), generator=generator)).pow(2).mean().backward()
            optimizer.step()
        return weights(model)

    try:
        run(_ours())
        error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {"distance": distance(run(_stock(sparse_as_dense=True)), run(_ours(sparse_as_dense=True))), "error": error}
