"""What a training script may do around the optimizer, and what it must be told when it goes wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers import hand_table
from tests.helpers.calls import calls_to_c
from tests.helpers.logs import messages
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights


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
        arrays = session(optimizer).exchange.state_arrays()["w"]
        rows.append(
            {
                "u": arrays["u"].tolist(),
                "v": arrays["v"].tolist(),
                "grad": [None if math.isnan(x) else x for x in w.grad.flatten().tolist()],
                "moved": (before - w.detach()).flatten().tolist(),
            }
        )
    return rows


def from_hook_to_c() -> list[list[str]]:
    """Calls of the package from a hook to the C library, of each bucket of a step."""
    hvd.init()
    model = smooth_model()
    compression = Compression.dgc(0.1, min_numel=1, bucket_bytes=1)
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
    train(model, optimizer, 2)
    with calls_to_c(session(optimizer).exchange.engines[0].kernels) as calls:
        train(model, optimizer, 1)
    return calls


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
    arrays = session(overflowed[1]).exchange.state_arrays()
    return {
        "same bits": fingerprint(plain[0]) == fingerprint(scaled[0]),
        "fingerprint": fingerprint(overflowed[0]),
        "scale grew": scaled[2].get_scale() > 1024,
        "scale fell": overflowed[2].get_scale() < scaled[2].get_scale(),
        "finite": all(bool(torch.isfinite(torch.from_numpy(a)).all()) for d in arrays.values() for a in d.values()),
        "finite weights": bool(torch.isfinite(weights(overflowed[0])).all()),
    }


def clipping() -> dict[str, Any]:
    """A script's own clipping after synchronize(): harmless with clip_norm at the same c, warned about without."""
    hvd.init()

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
    with messages() as texts:
        run(ours(), True)
        run(ours(clip_norm=0.5), True)
        run(ours(clip_norm=50.0), True)
    results["warnings"] = [text for text in texts if "clip_norm" in text]
    with messages() as texts:
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), ours())
        x, y = next(iter(batches(1, hvd.rank())))
        F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
    results["too late"] = [text for text in texts if "no effect" in text]
    return results


def synchronize_twice() -> dict[str, Any]:
    """A second synchronize(), or a step() that synchronizes although that is done, changes nothing."""
    hvd.init()
    results = []
    for times in (0, 1, 2):
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.02))
        for x, y in batches(10, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for _ in range(times):
                optimizer.synchronize()
            optimizer.step()
        results.append(fingerprint(model))
    return {"fingerprints": results}


def other_memory() -> dict[str, Any]:
    """A script that gives ``p.grad`` other memory while it is exchanged: too late to count, and no harm done."""
    hvd.init()
    results = []
    for replaces in (False, True):
        model = smooth_model()
        optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.02))
        for x, y in batches(10, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for p in model.parameters() if replaces else ():
                assert p.grad is not None
                p.grad.data = p.grad.data.clamp(-1e-4, 1e-4)
            optimizer.step()
        results.append(fingerprint(model))
    return {"fingerprints": results}


def epochs_observed() -> dict[str, Any]:
    """A warm-up in epochs follows ``DistributedSampler.set_epoch``."""
    hvd.init()
    model = smooth_model()
    compression = Compression.dgc(0.01, warmup=WarmupSchedule(epochs=3), min_numel=1)
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
    sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=hvd.size(), rank=hvd.rank())
    densities, before = [], 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        train(model, optimizer, 1)
        stats = optimizer.compression_stats()
        densities.append((stats["selected"] - before) / (stats["elements"] / stats["steps"]))
        before = stats["selected"]
    return {"densities": densities, "fingerprint": fingerprint(model)}


def half_density_bytes() -> dict[str, int]:
    """Bytes at density 0.5, where an allgather of packets would cost more than a dense ring."""
    hvd.init()
    model = smooth_model()
    train(
        model,
        optimizer := DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.5)),
        10,
    )
    return {**optimizer.compression_stats(), "fingerprint": fingerprint(model)}


def resume_on_rank_zero() -> dict[str, Any]:
    """Horovod's idiom: rank 0 alone loads a stock checkpoint, then everything is broadcast."""
    hvd.init()
    results = {}
    for name, kind, options in (("SGD", torch.optim.SGD, {"momentum": 0.9}), ("AdamW", torch.optim.AdamW, {})):
        model = smooth_model()
        stock = kind(model.parameters(), lr=0.01, **options)
        x, y = next(iter(batches(1, rank=0)))
        F.mse_loss(model(x), y).backward()
        stock.step()
        again = smooth_model()
        optimizer = DistributedOptimizer(
            kind(again.parameters(), lr=0.01, **options),
            again.named_parameters(),
            Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED),
        )
        if hvd.rank() == 0:
            again.load_state_dict(model.state_dict())
            optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
        hvd.broadcast_parameters(again.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for own, m in ((stock, model), (optimizer, again)):
            own.zero_grad()
            F.mse_loss(m(x), y).backward()  # the same batch on every rank: stock needs no exchange
            own.step()
        results[name] = distance(weights(model), weights(again))
    return results


def step_hooks() -> dict[str, Any]:
    """A post hook that clamps the weights sees the whole step, once; a pre hook sees every gradient."""
    hvd.init()
    results, calls = [], []
    for ours in (False, True):
        model = smooth_model()
        sgd = momentum_sgd(model)
        if ours:
            compression = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
            sgd = DistributedOptimizer(sgd, model.named_parameters(), compression)
            sgd.register_step_pre_hook(lambda *_: calls.append(all(p.grad is not None for p in model.parameters())))  # noqa: B023
        sgd.register_step_post_hook(_clamp)
        data = batches(10, hvd.rank())
        for x, y in data:
            sgd.zero_grad()
            F.mse_loss(model(x), y).backward()
            if not ours:
                for name, p in model.named_parameters():
                    p.grad = hvd.allreduce(p.grad, name=name)
            sgd.step()
        results.append(weights(model))
    return {"distance": distance(*results), "calls": calls}


def _clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.05, 0.05)


def overlapping_process_sets() -> dict[str, Any]:
    """An optimizer on ranks 0 and 1, then one on all ranks over the same parameter names."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    model = smooth_model()
    small = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1), process_set=pair)
    train(model, small, 2)
    del small
    everyone = smooth_model()
    train(everyone, DistributedOptimizer(momentum_sgd(everyone), everyone.named_parameters(), Compression.dgc(0.1)), 5)
    return {"fingerprint": fingerprint(everyone)}


def larger_batch_identity() -> dict[str, float]:
    """Sending everything every T steps with m = 0 is one step on a T times larger batch at T times the rate."""
    hvd.init()
    period, lr = 4, 0.01
    model = smooth_model()
    compression = Compression.threshold(1e30, max_density=1.0, compress_1d=True, min_numel=1, **UNROUNDED)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), compression)
    engines = session(optimizer).exchange.engines

    def send_every_period(step: int) -> None:
        for engine in engines:
            engine.config = engine.config.replace(threshold=2e-38 if step % period == period - 1 else 1e30)

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


def _clipped_with_decay() -> float:
    """Distance from stock Adam that adds weight decay to gradients which are clipped before."""
    ends = []
    for compresses in (False, True):
        model = smooth_model()
        optimizer: Any = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=0.1)
        if compresses:
            fields: dict[str, Any] = {"clip_norm": 0.3, "min_numel": 1, **UNROUNDED}
            compression = Compression.dgc(1.0, factor_masking=False, **fields)
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), compression)
        for x, y in batches(20, 0):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if not compresses:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
        ends.append(weights(model))
    return distance(*ends)


def single_process() -> dict[str, Any]:
    """With one rank: density 1 is plain torch SGD, a low density trains with momentum, nothing is communicated."""
    hvd.init()
    model = smooth_model()
    compression = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
    train(model, optimizer := DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression), 20)
    plain = smooth_model()
    train(plain, momentum_sgd(plain), 20)
    low = smooth_model()
    sgd = torch.optim.SGD(low.parameters(), lr=0.02, momentum=0.9)
    losses = train(low, DistributedOptimizer(sgd, low.named_parameters(), Compression.dgc(0.05)), 60)
    return {
        "size": hvd.size(),
        "distance": distance(weights(plain), weights(model)),
        "coupled decay, clipped": _clipped_with_decay(),
        "received": optimizer.compression_stats()["bytes_received"],
        "losses": [sum(losses[:5]), sum(losses[-5:])],
    }
