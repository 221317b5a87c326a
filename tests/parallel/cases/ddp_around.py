"""What is around a step with DDP: ranks that differ, clipping by the script, damaged replicas, gradients not finite."""

from __future__ import annotations

import copy
import io
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, WarmupSchedule, register
from tests.helpers.errors import error_of, error_told, stay_away
from tests.helpers.logs import messages
from tests.helpers.loss_scaling import found_in_scripts
from tests.helpers.regression import UNROUNDED, Dividing, batches, fingerprint, smooth_model


def _made(compression: Any, **options: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(smooth_model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, register(model, optimizer, compression)


def _steps(
    model: Any, optimizer: Any, steps: int, spoilt: Collection[int] = (), clip: float | None = None
) -> list[float]:
    norms = []
    for step, (x, y) in enumerate(batches(steps, dist.get_rank())):
        optimizer.zero_grad()
        x = x * torch.nan if step in spoilt and dist.get_rank() == 1 else x
        F.mse_loss(model(x), y).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return norms


def ranks_that_differ() -> dict[str, str]:
    """Another density, no compression at all, and what one rank alone refuses: an error on every rank, alike."""
    first = dist.get_rank() == 0
    found = {"density": error_of(lambda: _made(Compression.dgc(0.01 if first else 0.02)))}
    found["choice"] = error_of(lambda: _made(Compression.dgc(0.01) if first else Compression.none))

    def damped() -> None:
        model = DistributedDataParallel(smooth_model())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.0 if first else 0.1)
        register(model, sgd, Compression.dgc(0.01))

    found["refused"] = error_of(damped)

    def another_optimizer() -> None:
        model = DistributedDataParallel(smooth_model())
        kind = torch.optim.AdamW if first else torch.optim.SGD
        register(model, kind(model.parameters(), lr=0.1), Compression.dgc(0.01))

    found["optimizer"] = error_of(another_optimizer)
    return found


def clipping_by_the_script() -> dict[str, Any]:
    """``clip_grad_norm_`` after backward is learned: every rank then clips its own gradient."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    norms = _steps(model, optimizer, 5, clip=0.5)
    limits = [clip.limit for clip in session(optimizer).exchange.clipping.clips]
    return {"norms": norms, "limits": limits, "is": fingerprint(model)}


def clipping_more_on_one_rank() -> dict[str, Any]:
    """All ranks clip, or log, and rank 0 logs a layer's norm as well; rank 1 leaves out what it logs now and then."""
    found: dict[str, Any] = {}
    for name, limits in {"clipped": (0.5, 1e6), "logged": (1e6,)}.items():
        model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
        for step, (x, y) in enumerate(batches(8, dist.get_rank())):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            if dist.get_rank() == 0 and step % 4 > 1:
                nn.utils.clip_grad_norm_(model.module[0].parameters(), 1e6)
            for limit in limits if dist.get_rank() == 0 or step != 4 or 0.5 in limits else ():
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
            optimizer.step()
        last = session(optimizer).exchange.clipping.clips[-1]
        found[name] = {"last norm": norm, "is": fingerprint(model), "limit": last.limit}
    return found


def clipping_in_a_hook() -> list[float]:
    """A hook before the step clips: that is learned, too."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.5) and None)
    _steps(model, optimizer, 3)
    return [clip.limit for clip in session(optimizer).exchange.clipping.clips]


def frozen_later() -> dict[str, float]:
    """How far a layer goes that is frozen after a few steps, in weight decay and momentum of many more."""
    found = {}
    for name, compression in {"dgc": Compression.dgc(0.02), "topk": Compression.topk(0.02)}.items():
        model = DistributedDataParallel(smooth_model(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        register(model, optimizer, compression)
        _steps(model, optimizer, 3)
        frozen = model.module[0].weight.requires_grad_(False)
        before = frozen.detach().clone()
        _steps(model, optimizer, 10)
        found[name] = float((frozen - before).abs().max())
    return found


def frozen_in_dense_steps() -> dict[str, Any]:
    """AdamW after dense steps in none of which a layer had a gradient; it gets one in the end."""
    model = DistributedDataParallel(smooth_model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    warmup = WarmupSchedule(steps=4, first_density=1.0, factor=1e-3)
    register(model, optimizer, Compression.dgc(0.05, min_numel=64, warmup=warmup))
    frozen = model.module[0].weight.requires_grad_(False)
    before = frozen.detach().clone()
    _steps(model, optimizer, 8)
    optimizer.flush()
    _steps(model, optimizer, 2)
    found = {"stays": bool(torch.equal(before, frozen)), "is": fingerprint(model)}
    frozen.requires_grad_(True)
    _steps(model, optimizer, 4)
    moved = float((frozen.detach() - before).abs().max())
    return {**found, "moved": moved, "after": fingerprint(model)}


def scaled_now_and_then() -> dict[str, list[float]]:
    """Losses some of which a GradScaler has scaled, beside DDP alone."""

    def wrap(model: nn.Module, alone: bool) -> tuple[nn.Module, Any]:
        model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        if not alone:
            register(model, optimizer, Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED))
        return model, optimizer

    return found_in_scripts(wrap, dist.get_rank())


def takes_turns() -> dict[str, float]:
    """How far what was applied, and what waits, is from the gradients of two layers that are frozen in turn."""
    found = {}
    for scale in (1.0, 1024.0):
        model = DistributedDataParallel(smooth_model(), find_unused_parameters=True)
        optimizer = register(model, torch.optim.SGD(model.parameters(), lr=0.1), Compression.topk(0.02, min_numel=64))
        scaler = torch.amp.GradScaler("cpu", scale, growth_interval=100, enabled=scale > 1)
        layers = [model.module[0].weight, model.module[2].weight]
        before, sums = [p.detach().clone() for p in layers], [torch.zeros_like(p) for p in layers]
        for p, total in zip(layers, sums, strict=True):
            p.register_hook(lambda grad, total=total, scale=scale: [total.add_(grad / scale), grad][1])
        for step, (x, y) in enumerate(batches(8, dist.get_rank())):
            for i, p in enumerate(layers):
                p.requires_grad_(step % 2 == i)
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        for p, total in zip(layers, sums, strict=True):
            kept = session(optimizer).exchange.state_arrays()[session(optimizer).exchange.names[p]]["v"]
            total -= torch.from_numpy(kept).view(p.shape)
            dist.all_reduce(total)
            total /= dist.get_world_size()
        triples = zip(before, layers, sums, strict=True)
        found[f"scaled by {scale}"] = max(float(((a - p.detach()) / 0.1 - x).norm() / x.norm()) for a, p, x in triples)
    return found


def limit_without_compression() -> float:
    """Length of a step at rate 1 of an optimizer that ``auto`` leaves to DDP, with a limit."""
    model = DistributedDataParallel(smooth_model())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, dampening=0.1)
    optimizer = register(model, sgd, Compression.auto(clip_norm=0.01))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    _steps(model, optimizer, 1)
    return float((nn.utils.parameters_to_vector(model.parameters()) - before).norm())


def copied() -> dict[str, Any]:
    """A whole DDP, saved and loaded or copied, can be registered, and trains as one that begins with its weights."""
    compression = Compression.dgc(0.02, min_numel=64)
    model, optimizer = _made(compression)
    _steps(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    fresh = DistributedDataParallel(smooth_model())
    fresh.load_state_dict(model.state_dict())
    found = {}
    for name, made in {"fresh": fresh, "loaded": loaded, "copied": copy.deepcopy(model)}.items():
        own = register(made, torch.optim.SGD(made.parameters(), lr=0.05, momentum=0.9), compression)
        _steps(made, own, 3)
        found[name] = [own.compression_stats()["steps"], fingerprint(made)]
    _steps(model, optimizer, 1)
    return {**found, "of the model": optimizer.compression_stats()["steps"]}


def not_finite() -> dict[str, Any]:
    """A step that one rank cannot make is made by none; or the job stops."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    _steps(model, optimizer, 4, spoilt=[2])
    found = {"skipped": optimizer.compression_stats()["skipped"], "is": fingerprint(model)}
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64, on_nonfinite="stop"))
    found["stops"] = error_of(lambda: _steps(model, optimizer, 4, spoilt=[2]))
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64, on_nonfinite="stop"))
    model.module[2].weight.data[3, 4] = torch.nan
    found["had"] = error_of(lambda: _steps(model, optimizer, 1))
    model = DistributedDataParallel(smooth_model())
    optimizer = register(model, Dividing(model.parameters(), lr=0.05), Compression.dgc(0.02, min_numel=64))
    found["made"] = error_of(lambda: _steps(model, optimizer, 1))
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64, max_skipped=11))
    with messages() as texts:
        found["for long"] = error_of(lambda: _steps(model, optimizer, 20, spoilt=range(2, 20)))
    return {**found, "said": [text for text in texts if "skipped" in text]}


def replica_that_differs() -> dict[str, str]:
    """A weight that one rank alone changes is found at the next comparison, and repaired if that is wanted."""
    found = {}
    for what in ("stop", "broadcast"):
        model, optimizer = _made(Compression.dgc(0.02, min_numel=64, check_every=1, on_mismatch=what))

        def spoil(model: Any = model, optimizer: Any = optimizer) -> None:
            _steps(model, optimizer, 2)
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model.module[0].weight[0, 0] += 1
            _steps(model, optimizer, 3)

        found[what] = error_of(spoil) or fingerprint(model)
    return found


def bf16_model() -> dict[str, Any]:
    """Weights and gradients in bf16: replicas are the same, and learn."""
    torch.manual_seed(0)
    model = DistributedDataParallel(smooth_model().bfloat16(), gradient_as_bucket_view=True)
    optimizer = register(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), Compression.dgc(0.1))
    losses = []
    for x, y in batches(30, dist.get_rank()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x.bfloat16()).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"is": fingerprint(model.float()), "losses": losses}


def dropped() -> list[Any]:
    """What is told of an update that is not applied, where the optimizer drops it, and where the model does."""
    found = []
    for by in (1, 0):
        made = model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
        for i, (x, y) in enumerate(batches(3, dist.get_rank())):
            F.mse_loss(model(x), y).backward()
            if i:
                optimizer.step()
            made[by].zero_grad()
        found += [sorted(session(optimizer).told), fingerprint(model)]
    return found


def other_epochs() -> dict[str, str]:
    """The epoch of a warm-up is one ahead on rank 1: packets, dense steps, those of local steps, of nodes."""
    packets = WarmupSchedule(epochs=4)
    compressions = {
        "packets": Compression.dgc(0.001, warmup=packets),
        "from density 1": Compression.dgc(0.001, warmup=WarmupSchedule(epochs=4, first_density=1.0)),
        "clipped": Compression.dgc(0.001, warmup=packets, clip_norm=1.0),
        "nodes": Compression.dgc(0.001, warmup=packets, exchange="hierarchical", node_size=2),
        "local": Compression.local(steps=1, density=0.001, warmup=packets),
    }
    found = {}
    for name, compression in compressions.items():
        model, optimizer = _made(compression)
        optimizer.set_epoch(0)
        _steps(model, optimizer, 2)
        optimizer.set_epoch(1 + dist.get_rank())
        found[name] = error_of(lambda model=model, optimizer=optimizer: _steps(model, optimizer, 1))
    return found


def same_epochs() -> dict[str, Any]:
    """A warm-up that is told the epochs, and one that counts steps: weights, and bytes sent."""
    found = {}
    for name, counted in {"told": None, "counted": 2}.items():
        warmup = WarmupSchedule(epochs=3, steps_per_epoch=counted)
        model, optimizer = _made(Compression.dgc(0.01, min_numel=64, warmup=warmup))
        for epoch in range(6):
            optimizer.set_epoch(epoch)
            _steps(model, optimizer, 2)
        found[name] = fingerprint(model), optimizer.compression_stats()["bytes_sent"]
    return found


def flush_alone() -> str:
    """Rank 0 flushes, and rank 1 goes on training: what each says."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    _steps(model, optimizer, 2)
    return error_of(optimizer.flush if dist.get_rank() == 0 else lambda: _steps(model, optimizer, 1))


def flush_after_more_steps() -> str:
    """Rank 0 has a batch more, and DDP's own collectives are over; then all flush: what each says."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64), broadcast_buffers=False)

    def train() -> None:
        _steps(model, optimizer, 2 + (dist.get_rank() == 0))
        optimizer.flush()

    return error_of(train)


def late() -> str:
    """What a rank says that waits for one that makes no step."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    if dist.get_rank() == 0:
        return error_told(lambda: _steps(model, optimizer, 1), Path(os.environ["DGC_TEST_FOLDER"]))
    x, y = next(iter(batches(1, 1)))
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    stay_away(Path(os.environ["DGC_TEST_FOLDER"]))
    return ""


def unregistered() -> str:
    """What a rank says that waits for one that does not register."""
    model = DistributedDataParallel(smooth_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if dist.get_rank() == 1:
        time.sleep(4)
        return ""
    os.environ["DGC_TIMEOUT"] = "2"
    return error_of(lambda: register(model, optimizer, Compression.dgc(0.02)))


def unwritable_metrics() -> dict[str, Any]:
    """A metrics file that rank 0 cannot write: no rank is registered, and what is there goes on as with DDP alone."""
    model = DistributedDataParallel(smooth_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    os.environ["DGC_METRICS_FILE"] = f"{os.devnull}/metrics.jsonl"
    try:
        error = error_of(lambda: register(model, optimizer, Compression.dgc(0.02, min_numel=64)))
    finally:
        del os.environ["DGC_METRICS_FILE"]
    _steps(model, optimizer, 2, clip=1.0)
    register(model, optimizer, Compression.dgc(0.02, min_numel=64))
    _steps(model, optimizer, 2, clip=1.0)
    return {"error": error, "is": fingerprint(model)}


def another_choice() -> dict[str, Any]:
    """What a model was registered with before, and what it is registered with then."""
    model = DistributedDataParallel(smooth_model())
    first = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    register(model, first, Compression.fp16)
    _steps(model, first, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped = AcceleratedOptimizer(optimizer)
    returned = register(model, wrapped, Compression.dgc(0.02, min_numel=64))
    _steps(model, optimizer, 2)
    refused = error_of(lambda: register(model, returned, Compression.none))
    _steps(model, optimizer, 2)
    return {
        "is": fingerprint(model),
        "steps": optimizer.compression_stats()["steps"],
        "refused": refused,
        "given back": returned is wrapped,
    }


class AcceleratedOptimizer:
    """What accelerate puts around an optimizer, known by the state that it shares with it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state


def clipped_by_hand() -> dict[str, Any]:
    """A script that multiplies every gradient there is, beside a layer that is frozen."""
    model = DistributedDataParallel(smooth_model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    register(model, optimizer, Compression.dgc(0.02, min_numel=64))
    model.module[0].requires_grad_(False)
    with messages() as texts:
        for x, y in batches(3, dist.get_rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = float(torch.stack([grad.norm() for grad in grads]).norm())
            for grad in grads:
                grad.mul_(min(1.0, 0.1 / norm))
            optimizer.step()
    return {"is": fingerprint(model), "told": [text for text in texts if "clip" in text]}


def metrics() -> str:
    """The path of the metrics file, which rank 0 alone writes."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    _steps(model, optimizer, 4)
    return os.environ["DGC_METRICS_FILE"]
