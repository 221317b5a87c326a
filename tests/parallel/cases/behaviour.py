"""What a training script may do around the optimizer, and what it must be told when it goes wrong."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from dgc_horovod.torch.exchange import state_arrays
from tests.helpers import hand_table
from tests.helpers.training import batches, distance, fingerprint, smooth_model, train, weights


def hand_tables() -> dict[str, Any]:
    """u, v, ``p.grad`` and weights of the hand-computed steps, gradients fed by ``loss = sum(w*g)``."""
    hvd.init()
    return {
        "momentum": _run_table(hand_table.GRADIENTS, nesterov=False),
        "nesterov": _run_table(hand_table.GRADIENTS, nesterov=True),
        "nan": _run_table(hand_table.GRADIENTS_WITH_NAN, nesterov=False),
    }


def _run_table(gradients: list[Any], nesterov: bool) -> list[dict[str, Any]]:
    w = nn.Parameter(torch.zeros(2, 3))
    sgd = torch.optim.SGD([w], lr=1.0, momentum=hand_table.MOMENTUM, nesterov=nesterov)
    optimizer = DistributedOptimizer(sgd, [("w", w)], Compression.dgc(hand_table.DENSITY, min_numel=1))
    rows = []
    for step in gradients:
        optimizer.zero_grad()
        before = w.detach().clone()
        (w * torch.tensor(step[hvd.rank()]).view(2, 3)).sum().backward()
        optimizer.step()
        arrays = state_arrays(optimizer._dgc)["w"]
        rows.append(
            {
                "u": arrays["u"].tolist(),
                "v": arrays["v"].tolist(),
                "grad": [None if math.isnan(x) else x for x in w.grad.flatten().tolist()],
                "moved": (before - w.detach()).flatten().tolist(),
            }
        )
    return rows


def loss_scaling() -> dict[str, Any]:
    """GradScaler: with ``grad_scaler=`` the same bits as without scaling; an overflow on one rank skips all."""
    hvd.init()

    def run(scaled: bool, overflow_at: int | None = None) -> tuple[nn.Module, Any, Any]:
        model = smooth_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled, growth_interval=7)
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        compression = Compression.dgc(0.05, compress_1d=True, min_numel=1)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression, grad_scaler=scaler)
        for step, (x, y) in enumerate(batches(20, hvd.rank())):
            optimizer.zero_grad()
            if step == overflow_at and hvd.rank() == hvd.size() - 1:
                x = x * float("inf")
            scaler.scale(F.mse_loss(model(x), y)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return model, optimizer, scaler

    plain, scaled, overflowed = run(False), run(True), run(True, overflow_at=5)
    arrays = state_arrays(overflowed[1]._dgc)
    return {
        "same bits": fingerprint(plain[0]) == fingerprint(scaled[0]),
        "fingerprint": fingerprint(overflowed[0]),
        "scale grew": scaled[2].get_scale() > 1024,
        "scale fell": overflowed[2].get_scale() < scaled[2].get_scale(),
        "finite": all(bool(torch.isfinite(torch.from_numpy(a)).all()) for d in arrays.values() for a in d.values()),
        "finite weights": bool(torch.isfinite(weights(overflowed[0])).all()),
    }


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def clipping() -> dict[str, Any]:
    """A script's own clipping after synchronize(): harmless with clip_norm at the same c, warned about without."""
    hvd.init()
    handler = _Warnings()
    logging.getLogger("dgc_horovod").addHandler(handler)

    def run(compression: Any, later_clip: bool, op: int = hvd.Average) -> nn.Module:
        model = smooth_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression, op=op)
        for x, y in batches(20, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.synchronize()
            if later_clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with optimizer.skip_synchronize():
                optimizer.step()
        return model

    ours = lambda **fields: Compression.dgc(0.02, **fields)  # noqa: E731
    results = {
        "harmless": fingerprint(run(ours(clip_norm=0.5), True)) == fingerprint(run(ours(clip_norm=0.5), False)),
        "clip acts": distance(weights(run(ours(), False)), weights(run(ours(clip_norm=0.5), False))),
        "loose clip": fingerprint(run(ours(), False)) == fingerprint(run(ours(clip_norm=1e6), False)),
    }
    handler.texts.clear()
    run(ours(), True)
    run(ours(clip_norm=0.5), True)
    run(ours(clip_norm=50.0), True)
    results["warnings"] = [text for text in handler.texts if "clip_norm" in text]
    handler.texts.clear()
    model = smooth_model()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), ours())
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    results["too late"] = [text for text in handler.texts if "no effect" in text]
    logging.getLogger("dgc_horovod").removeHandler(handler)
    return results


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
    results["errors"] = {
        "wrap twice": _error(lambda: DistributedOptimizer(again, model.named_parameters(), Compression.dgc())),
        "add_param_group": _error(lambda: again.add_param_group({"params": []})),
        "adasum": _error(
            lambda: DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(), op=hvd.Adasum)
        ),
        "duplicate names": _error(
            lambda: DistributedOptimizer(_sgd(model), [("a", p) for p in model.parameters()], Compression.dgc())
        ),
        "missing names": _error(
            lambda: DistributedOptimizer(_sgd(model), list(model.named_parameters())[1:], Compression.dgc())
        ),
        "not called": _error(lambda: DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc)),
        "dampening": _error(
            lambda: DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
                model.named_parameters(),
                Compression.dgc(),
            )
        ),
        "zero_grad between": _error(lambda: _zero_grad_between(model)),
        "stock given ours": _error(lambda: _stock_given_ours()),
        "epoch unknown": _error(lambda: _epoch_unknown()),
        "arguments swapped": _error(lambda: DistributedOptimizer(_sgd(model), Compression.dgc())),
        "model for optimizer": _error(lambda: DistributedOptimizer(model, model.named_parameters(), Compression.dgc())),
        "step twice": _error(lambda: _step_twice()),
        "elastic": _error(lambda: _under_elastic(model)),
        "unfrozen later": _error(lambda: _unfrozen_later()),
    }
    return results


def _stepper(scheduler: Any) -> Callable[[int], None]:
    return lambda step: scheduler.step()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _zero_grad_between(model: nn.Module) -> None:
    model = smooth_model()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    try:
        optimizer.zero_grad()
    finally:
        optimizer.step()


def _stock_given_ours() -> None:
    model = smooth_model()
    train(model, hvd.DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.1)), 1)


def _epoch_unknown() -> None:
    model = smooth_model()
    compression = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2))
    train(model, DistributedOptimizer(_sgd(model), model.named_parameters(), compression), 1)


def _step_twice() -> None:
    model = smooth_model()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    train(model, optimizer, 2)
    optimizer.step()


def synchronize_twice() -> dict[str, Any]:
    """A second synchronize(), or a step() that synchronizes although that is done, changes nothing."""
    hvd.init()
    results = []
    for times in (0, 1, 2):
        model = smooth_model()
        optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.02))
        for x, y in batches(10, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for _ in range(times):
                optimizer.synchronize()
            optimizer.step()
        results.append(fingerprint(model))
    return {"fingerprints": results}


def _under_elastic(model: nn.Module) -> None:
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def _unfrozen_later() -> None:
    model = smooth_model()
    model[0].weight.requires_grad_(False)
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.1))
    train(model, optimizer, 2, before_backward=lambda step: model[0].weight.requires_grad_(step == 1))


def epochs_observed() -> dict[str, Any]:
    """A warm-up in epochs follows ``DistributedSampler.set_epoch``."""
    hvd.init()
    model = smooth_model()
    compression = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=3), min_numel=1)
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), compression)
    sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=hvd.size(), rank=hvd.rank())
    densities, before = [], 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        train(model, optimizer, 1)
        stats = optimizer.compression_stats()
        densities.append((stats["selected"] - before) / (stats["elements"] / stats["steps"]))
        before = stats["selected"]
    return {"densities": densities, "fingerprint": fingerprint(model)}


def disagreements() -> dict[str, str]:
    """Ranks that differ in config, names, shapes, options or epoch: the same error on every rank."""
    hvd.init()
    last = hvd.rank() == hvd.size() - 1

    def wrap(model: nn.Module, compression: Any, names: Any = None, **arguments: Any) -> Any:
        return DistributedOptimizer(_sgd(model), names or model.named_parameters(), compression, **arguments)

    small = nn.Sequential(nn.Linear(32, 64 if last else 65))
    renamed = [(f"{'other.' if last else ''}{name}", p) for name, p in smooth_model().named_parameters()]
    holder = nn.ParameterList([p for _, p in renamed])

    def different_epochs() -> None:
        m = smooth_model()
        optimizer = wrap(m, Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2)))
        optimizer.set_epoch(3 if last else 1)
        train(m, optimizer, 1)

    return {
        "density": _error(lambda: wrap(smooth_model(), Compression.dgc(0.02 if last else 0.01))),
        "rule": _error(lambda: wrap(smooth_model(), Compression.topk(0.01) if last else Compression.gaussian(0.01))),
        "compression": _error(lambda: wrap(smooth_model(), Compression.none if last else Compression.dgc(0.01))),
        "shapes": _error(lambda: wrap(small, Compression.dgc(0.01))),
        "names": _error(lambda: DistributedOptimizer(_sgd(holder), renamed, Compression.dgc(0.01))),
        "tensor count": _error(lambda: wrap(smooth_model()[: 2 if last else 4], Compression.dgc(0.01))),
        "passes": _error(
            lambda: wrap(smooth_model(), Compression.dgc(0.01), backward_passes_per_step=2 if last else 1)
        ),
        "epoch": _error(different_epochs),
    }


def missing_rank() -> dict[str, Any]:
    """The last rank stays away from a step: the others give up after DGC_TIMEOUT, naming what they waited for."""
    hvd.init()
    model = smooth_model()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.01))
    train(model, optimizer, 2)
    start = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(8)
        return {"error": "", "seconds": 0}
    error = _error(lambda: train(model, optimizer, 1))
    return {"error": error, "seconds": time.monotonic() - start}


def half_density_bytes() -> dict[str, int]:
    """Bytes at density 0.5, where an allgather of packets would cost more than a dense ring."""
    hvd.init()
    model = smooth_model()
    train(model, optimizer := DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.5)), 10)
    return {**optimizer.compression_stats(), "fingerprint": fingerprint(model)}


def low_precision() -> dict[str, Any]:
    """A bfloat16 model: gradients are accumulated in fp32, p.grad comes back in its own dtype."""
    hvd.init()
    model = smooth_model().bfloat16()
    optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    for x, y in batches(10, hvd.rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
        optimizer.step()
    arrays = state_arrays(optimizer._dgc)
    dtypes = sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None})
    return {
        "fingerprint": fingerprint(model.float()),
        "dtypes": dtypes,
        "state dtypes": sorted({str(a.dtype) for d in arrays.values() for a in d.values()}),
    }


def larger_batch_identity() -> dict[str, float]:
    """Sending everything every T steps with m = 0 is one step on a T times larger batch at T times the rate."""
    hvd.init()
    period, lr = 4, 0.01
    model = smooth_model()
    compression = Compression.threshold(1e30, max_density=1.0, compress_1d=True, min_numel=1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), compression)
    engines = [run.engine for run in optimizer._dgc._runs]

    def send_every_period(step: int) -> None:
        for engine in engines:
            engine.config = engine.config.replace(threshold=1e-45 if step % period == period - 1 else 1e30)

    train(model, optimizer, 5 * period, before_backward=send_every_period)

    larger = smooth_model()
    stock = hvd.DistributedOptimizer(torch.optim.SGD(larger.parameters(), lr=period * lr), larger.named_parameters())
    data = list(batches(5 * period, hvd.rank()))
    for first in range(0, len(data), period):
        x, y = (torch.cat(parts) for parts in zip(*data[first : first + period], strict=True))
        stock.zero_grad()
        F.mse_loss(larger(x), y).backward()
        stock.step()
    return {"distance": distance(weights(larger), weights(model))}


def single_process() -> dict[str, Any]:
    """With one rank: density 1 is plain torch SGD, a low density trains with momentum, nothing is communicated."""
    hvd.init()
    model = smooth_model()
    compression = Compression.dgc(1.0, factor_masking=False, min_numel=1)
    train(model, optimizer := DistributedOptimizer(_sgd(model), model.named_parameters(), compression), 20)
    plain = smooth_model()
    train(plain, _sgd(plain), 20)
    low = smooth_model()
    sgd = torch.optim.SGD(low.parameters(), lr=0.02, momentum=0.9)
    losses = train(low, DistributedOptimizer(sgd, low.named_parameters(), Compression.dgc(0.05)), 60)
    return {
        "size": hvd.size(),
        "distance": distance(weights(plain), weights(model)),
        "received": optimizer.compression_stats()["bytes_received"],
        "losses": [sum(losses[:5]), sum(losses[-5:])],
    }
