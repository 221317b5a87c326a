"""What a script must be told: the messages of everything that is refused, and of ranks that disagree."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from dgc_horovod.torch.wrapping import checks
from tests.helpers.errors import error_of
from tests.helpers.training import batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights


def script_habits() -> dict[str, Any]:
    """zero_grad with arguments, schedulers, state_dict both ways, broadcast, wrapping again, stock given ours."""
    hvd.init()
    model = smooth_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), Compression.dgc(0.05))
    before = weights(model)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    results: dict[str, Any] = {"broadcast moved weights": distance(before, weights(model))}
    train(model, optimizer, 10, after_step=_stepper(torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)))
    results["lr"] = optimizer.param_groups[0]["lr"]
    results["momentum shown"] = optimizer.param_groups[0]["momentum"]
    results["is SGD"] = isinstance(optimizer, torch.optim.SGD)
    for to_none in (False, True):
        optimizer.zero_grad(set_to_none=to_none)
    stock = torch.optim.SGD(smooth_model().parameters(), lr=0.1, momentum=0.9)
    stock.load_state_dict(optimizer.state_dict())
    results["stock momentum"] = stock.param_groups[0]["momentum"]
    optimizer.load_state_dict(stock.state_dict())
    train(model, optimizer, 3)
    again = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02), model.named_parameters(), Compression.topk(0.05)
    )
    del optimizer
    train(model, again, 3)
    results["fingerprint"] = fingerprint(model)
    results["errors"] = _errors(model, again)
    return results


def _errors(model: nn.Module, wrapped: Any) -> dict[str, str]:
    named, dgc = list(model.named_parameters()), Compression.dgc()
    dampened = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)

    def made(*arguments: Any, **more: Any) -> Callable[[], Any]:
        return lambda: DistributedOptimizer(momentum_sgd(model), *arguments, **more)

    attempts: dict[str, Callable[[], Any]] = {
        "wrap twice": lambda: DistributedOptimizer(wrapped, named, dgc),
        "add_param_group": lambda: wrapped.add_param_group({"params": []}),
        "adasum": made(named, dgc, op=hvd.Adasum),
        "predivide": made(named, dgc, gradient_predivide_factor=0.0),
        "predivide, a text": made(named, dgc, gradient_predivide_factor="2"),
        "passes, a text": made(named, dgc, backward_passes_per_step="2"),
        "duplicate names": made([("a", p) for p in model.parameters()], dgc),
        "missing names": made(named[1:], dgc),
        "not called": made(named, Compression.dgc),
        "dampening": lambda: DistributedOptimizer(dampened, named, dgc),
        "zero_grad between": lambda: _zero_grad_between(model),
        "gradients removed": _gradients_removed,
        "stock given ours": _stock_given_ours,
        "epoch unknown": _epoch_unknown,
        "arguments swapped": made(dgc),
        "model for optimizer": lambda: DistributedOptimizer(model, named, dgc),
        "step twice": _step_twice,
        "unscaled too early": _scaler_without_synchronize,
        "scaler not passed": lambda: _scaler_without_synchronize(passed=False),
        "loaded too early": _load_between,
        "unfrozen later": _unfrozen_later,
    }
    return {name: error_of(attempt) for name, attempt in attempts.items()}


def _stepper(scheduler: Any) -> Callable[[int], None]:
    return lambda step: scheduler.step()


def _zero_grad_between(model: nn.Module) -> None:
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    try:
        optimizer.zero_grad()
    finally:
        optimizer.step()


def _gradients_removed() -> None:
    """By the model's own zero_grad, while a tensor that was not used keeps its bucket from leaving."""
    model, unused = smooth_model(), nn.Parameter(torch.zeros(40, 40))
    sgd = torch.optim.SGD([*model.parameters(), unused], lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, [*model.named_parameters(), ("unused", unused)], Compression.dgc(0.1))
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    model.zero_grad()
    optimizer.step()


def _stock_given_ours() -> None:
    model = smooth_model()
    train(model, hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1)), 1)


def _epoch_unknown() -> None:
    model = smooth_model()
    compression = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2))
    train(model, DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression), 1)


def _step_twice() -> None:
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    train(model, optimizer, 2)
    optimizer.step()


def _scaler_without_synchronize(passed: bool = True) -> None:
    model = smooth_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    given = {"grad_scaler": scaler} if passed else {}
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1), **given)
    x, y = next(iter(batches(1, hvd.rank())))
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(optimizer)


def _load_between() -> None:
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        optimizer.step()


def _unfrozen_later() -> None:
    model = smooth_model()
    model[0].weight.requires_grad_(False)
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    train(model, optimizer, 2, before_backward=lambda step: model[0].weight.requires_grad_(step == 1))


def disagreements() -> dict[str, str]:
    """Ranks that differ in config, names, shapes, options or epoch: the same error on every rank."""
    hvd.init()
    last = hvd.rank() == hvd.size() - 1

    def wrap(model: nn.Module, compression: Any, names: Any = None, **arguments: Any) -> Any:
        return DistributedOptimizer(momentum_sgd(model), names or model.named_parameters(), compression, **arguments)

    small = nn.Sequential(nn.Linear(32, 64 if last else 65))
    renamed = [(f"{'other.' if last else ''}{name}", p) for name, p in smooth_model().named_parameters()]
    holder = nn.ParameterList([p for _, p in renamed])

    def different_epochs() -> None:
        m = smooth_model()
        optimizer = wrap(m, Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2)))
        optimizer.set_epoch(3 if last else 1)
        train(m, optimizer, 1)

    def other_optimizer() -> None:
        model = smooth_model()
        kind = torch.optim.RMSprop if last else torch.optim.Adagrad
        DistributedOptimizer(kind(model.parameters()), model.named_parameters(), Compression.topk(0.01))

    def other_version() -> None:
        was = checks.__version__
        checks.__version__ = "0.0" if last else was
        try:
            wrap(smooth_model(), Compression.dgc(0.01))
        finally:
            checks.__version__ = was

    return {
        "density": error_of(lambda: wrap(smooth_model(), Compression.dgc(0.02 if last else 0.01))),
        "rule": error_of(lambda: wrap(smooth_model(), Compression.topk(0.01) if last else Compression.gaussian(0.01))),
        "scaler": error_of(
            lambda: wrap(
                smooth_model(), Compression.dgc(0.01), grad_scaler=None if last else torch.amp.GradScaler("cpu")
            )
        ),
        "groups": error_of(lambda: wrap(smooth_model(), Compression.dgc(0.01), num_groups=2 if last else 3)),
        "compression": error_of(lambda: wrap(smooth_model(), Compression.none if last else Compression.dgc(0.01))),
        "shapes": error_of(lambda: wrap(small, Compression.dgc(0.01))),
        "names": error_of(lambda: DistributedOptimizer(momentum_sgd(holder), renamed, Compression.dgc(0.01))),
        "tensor count": error_of(lambda: wrap(smooth_model()[: 2 if last else 4], Compression.dgc(0.01))),
        "passes": error_of(
            lambda: wrap(smooth_model(), Compression.dgc(0.01), backward_passes_per_step=2 if last else 1)
        ),
        "epoch": error_of(different_epochs),
        "optimizer": error_of(other_optimizer),
        "version": error_of(other_version),
    }


def missing_rank() -> dict[str, Any]:
    """The last rank stays away from a step: the others give up after DGC_TIMEOUT, naming what they waited for."""
    hvd.init()
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.01))
    train(model, optimizer, 2)
    start = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(8)
        return {"error": "", "seconds": 0}
    error = error_of(lambda: train(model, optimizer, 1))
    return {"error": error, "seconds": time.monotonic() - start}
