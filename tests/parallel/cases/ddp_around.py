"""What is around a step with DDP: ranks that differ, clipping by the script, damaged replicas, gradients not finite."""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, register
from tests.helpers.errors import error_of, error_told, stay_away
from tests.helpers.regression import batches, fingerprint, smooth_model


def _made(compression: Any, **options: Any) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(smooth_model(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, register(model, optimizer, compression)


def _steps(model: Any, optimizer: Any, steps: int, spoilt: int = -1, clip: float | None = None) -> list[float]:
    norms = []
    for step, (x, y) in enumerate(batches(steps, dist.get_rank())):
        optimizer.zero_grad()
        x = x * torch.nan if step == spoilt and dist.get_rank() == 1 else x
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
    return {"norms": norms, "limits": [clip.limit for clip in optimizer._dgc.clipping.clips], "is": fingerprint(model)}


def clipping_in_a_hook() -> list[float]:
    """A hook before the step clips: that is learned, too."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.5) and None)
    _steps(model, optimizer, 3)
    return [clip.limit for clip in optimizer._dgc.clipping.clips]


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
    _steps(model, optimizer, 4, spoilt=2)
    found = {"skipped": optimizer.compression_stats()["skipped"], "is": fingerprint(model)}
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64, on_nonfinite="stop"))
    return {**found, "stops": error_of(lambda: _steps(model, optimizer, 4, spoilt=2))}


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


def dropped() -> list[str]:
    """What is told of an update that is not applied."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    x, y = next(iter(batches(1, dist.get_rank())))
    F.mse_loss(model(x), y).backward()
    optimizer.zero_grad()
    _steps(model, optimizer, 2)
    return sorted(optimizer._dgc_told)


def late() -> str:
    """What a rank says that waits for one that makes no step."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    if dist.get_rank() == 0:
        return error_told(lambda: _steps(model, optimizer, 1))
    x, y = next(iter(batches(1, 1)))
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    stay_away()
    return ""


def metrics() -> str:
    """The path of the metrics file, which rank 0 alone writes."""
    model, optimizer = _made(Compression.dgc(0.02, min_numel=64))
    _steps(model, optimizer, 4)
    return os.environ["DGC_METRICS_FILE"]
