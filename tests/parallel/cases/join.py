"""Ranks with different numbers of batches: join() instead of steps that nobody takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.bound_before import join as bound_before
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights

PAIR = hvd.ProcessSet([0, 1])
Make = Callable[[nn.Module], torch.optim.Optimizer]


def _nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-3)


def _dgc(model: nn.Module, make: Make = momentum_sgd, density: float = 0.05, **fields: Any) -> Any:
    compression = Compression.dgc(density, **{"min_numel": 16, "check_every": 1, **fields})
    return DistributedOptimizer(make(model), model.named_parameters(), compression)


def _own_steps() -> int:
    """The highest rank but one has most batches."""
    return {hvd.size() - 2: 9, hvd.size() - 1: 7}.get(hvd.rank(), 4)


def like_stock() -> dict[str, Any]:
    """At density 1 it is stock's join, followed by the broadcasts that stock leaves to the script."""
    hvd.init(process_sets=[PAIR])
    found: dict[str, Any] = {}
    for name, make in {"momentum": momentum_sgd, "nesterov": _nesterov}.items():
        stock, ours = smooth_model(), smooth_model()
        reference = hvd.DistributedOptimizer(make(stock), stock.named_parameters())
        train(stock, reference, _own_steps())
        last = hvd.join()
        hvd.broadcast_parameters(stock.state_dict(), last)
        hvd.broadcast_optimizer_state(reference, last)
        optimizer = _dgc(ours, make, 1.0, factor_masking=False, **{**UNROUNDED, "min_numel": 1})
        train(ours, optimizer, _own_steps())
        result = {"stock's last": last, "last": hvd.join(), "joined": distance(weights(stock), weights(ours))}
        train(stock, reference, 3)
        train(ours, optimizer, 3)
        result["afterwards"] = distance(weights(stock), weights(ours))
        found[name] = {**result, "fingerprint": fingerprint(ours)}
        del optimizer  # join() would wait for its steps, not for those of the next stock one
    return found


def nobodys_step() -> dict[str, Any]:
    """All join after the same step: training goes on as if nobody had, to the last bit."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, make in {"SGD": _nesterov, "Adam": _adam}.items():
        results = []
        for joins in (False, True):
            model = smooth_model()
            optimizer = _dgc(model, make)
            if joins:
                hvd.join()  # before the first step too
            train(model, optimizer, 5)
            before = {p: p.grad for p in model.parameters()}
            last = hvd.join() if joins else hvd.size() - 1
            kept = all(p.grad is before[p] for p in model.parameters())
            train(model, optimizer, 5)
            stats = optimizer.compression_stats()
            results.append([fingerprint(model), last, kept, stats["steps"], stats["selected"]])
        found[name] = results
        del optimizer
    return found


def other_learning_rates() -> dict[str, Any]:
    """A scheduler counts batches, so those who join early have another rate; their weights become the last one's."""
    hvd.init()
    found = {}
    for name, make in {"SGD": _nesterov, "Adam": _adam}.items():
        model = smooth_model()
        optimizer = _dgc(model, make, on_mismatch="stop")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for _ in range(2):  # epochs
            train(model, optimizer, _own_steps(), after_step=lambda step, s=scheduler: s.step())
            last = hvd.join()
            scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), last))
        found[name] = [fingerprint(model), optimizer.param_groups[0]["lr"], optimizer.compression_stats()["steps"]]
    return found


def two_optimizers() -> dict[str, Any]:
    """One is stepped twice as often as the other: nobody tells those in join which one comes next."""
    hvd.init()
    first, second = smooth_model(), smooth_model(1)
    often, seldom = _dgc(first), _dgc(second, _adam)
    for step in range(_own_steps()):
        train(first, often, 1)
        if step % 2:
            train(second, seldom, 1)
    last = hvd.join()
    steps = [optimizer.compression_stats()["steps"] for optimizer in (often, seldom)]
    return {"last": last, "steps": steps, "fingerprints": [fingerprint(first), fingerprint(second)]}


def not_finite() -> dict[str, Any]:
    """A step of those who still have data is not finite: it is skipped in join as well."""
    hvd.init()
    model = smooth_model()
    optimizer = _dgc(model)
    for step, (x, y) in enumerate(batches(_own_steps(), hvd.rank())):
        optimizer.zero_grad()
        F.mse_loss(model(x * float("nan") if step == 6 else x), y).backward()
        optimizer.step()
    last = hvd.join()
    train(model, optimizer, 2)
    return {"last": last, "finite": bool(weights(model).isfinite().all()), "fingerprint": fingerprint(model)}


def part_of_a_step() -> dict[str, Any]:
    """A backward pass that makes no whole step stays for the next one; a loss scale grows meanwhile."""
    hvd.init()
    model = smooth_model()
    optimizer = DistributedOptimizer(
        momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05, min_numel=16, check_every=1), 2
    )
    train(model, optimizer, _own_steps(), passes=2)
    optimizer.zero_grad()
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    hvd.join()
    kept = all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))
    F.mse_loss(model(x), y).backward()
    optimizer.step()

    scaled = smooth_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    driven = DistributedOptimizer(
        momentum_sgd(scaled), scaled.named_parameters(), Compression.dgc(0.05, min_numel=16), grad_scaler=scaler
    )
    for _ in range(2):
        for x, y in batches(_own_steps(), hvd.rank()):
            driven.zero_grad()
            scaler.scale(F.mse_loss(scaled(x), y)).backward()
            driven.synchronize()
            with driven.skip_synchronize():
                scaler.step(driven)
            scaler.update()
        hvd.join()
    return {"kept": kept, "fingerprints": [fingerprint(model), fingerprint(scaled)], "scale": scaler.get_scale()}


def refused() -> dict[str, str]:
    """Where it cannot be, in words, on every rank."""
    hvd.init()
    small = nn.Linear(2, 2)
    nothing = DistributedOptimizer(
        momentum_sgd(small), small.named_parameters(), Compression.dgc(0.1, dense_values="fp32")
    )
    found = {"nothing compressed": error_of(hvd.join)}
    del nothing
    model = smooth_model()
    optimizer = _dgc(model)
    found["bound before"] = error_of(bound_before)
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    found["between"] = error_of(hvd.join)
    optimizer.step()
    del optimizer
    if hvd.rank() < 2:
        of_two = DistributedOptimizer(
            momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1), process_set=PAIR
        )
        found["part"] = error_of(hvd.join)
        del of_two
    hvd.barrier()
    found["stock again"] = str(hvd.join())
    return found


def something_else_meanwhile() -> dict[str, Any]:
    """One rank waits in join while another averages a metric: an error that says so, and no hang."""
    hvd.init()
    model = smooth_model()
    optimizer = _dgc(model)
    train(model, optimizer, 3)
    start, error = time.monotonic(), ""
    if hvd.rank() == 0:
        os.environ["DGC_TIMEOUT"] = "2"
        error = error_of(hvd.join)
    hvd.allreduce(torch.zeros(1), name="metric")
    return {"error": error, "seconds": time.monotonic() - start}
