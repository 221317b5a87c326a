"""Compression.auto under DDP: DDP's own bits before a choice, switches that lose nothing, one choice for all."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.planning.trial import COMPRESSED, DENSE, MOST_TIMED, SETTLING
from dgc_horovod.state.residual_state import EARLIER_FP16
from dgc_horovod.testing.torch import session, take
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, load_checkpoint, register, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights

STEPS = 24
ORDER = (DENSE, COMPRESSED, DENSE, COMPRESSED, COMPRESSED, DENSE)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


OPTIMIZERS = {"SGD": _sgd, "AdamW": _adamw}


def _made(make: Any = _sgd, mode: str | None = DENSE, views: bool = False, **fields: Any) -> tuple[Any, Any]:
    """A model and its optimizer, whose exchange stays what it is until it is told; mode None: it chooses."""
    model = DistributedDataParallel(smooth_model(), gradient_as_bucket_view=views)
    given = Compression.auto(**{"density": 0.05, "min_numel": 16, **fields})
    optimizer = register(model, make(model), given)
    if mode is not None:
        take(optimizer, mode)
    return model, optimizer


def _step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def _stock(make: Any, half: bool = False, clip: float | None = None) -> Any:
    model = DistributedDataParallel(smooth_model())
    if half:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = make(model)
    for x, y in batches(STEPS, dist.get_rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def _is_same(model: Any, other: Any, halves: Any) -> bool:
    """Bit by bit; torch's hook of fp16 divides before the sum and ours after it, which small gradients tell apart."""
    if not halves:
        return fingerprint(model) == fingerprint(other)
    return 0 < distance(weights(other), weights(model)) < 1e-3


def dense_steps() -> dict[str, bool]:
    """Before a choice every bit is DDP's own; gradients may be accumulated."""
    found = {}
    for name, make in OPTIMIZERS.items():
        model, optimizer = _made(make)
        for x, y in batches(STEPS, dist.get_rank()):
            _step(model, optimizer, x, y)
        found[name] = fingerprint(model) == fingerprint(_stock(make))
    model, optimizer = _made(clip_norm=0.5, views=True)
    for x, y in batches(STEPS, dist.get_rank()):
        _step(model, optimizer, x, y)
    found["clip_norm"] = fingerprint(model) == fingerprint(_stock(_sgd, clip=0.5))
    return found


def switching() -> dict[str, Any]:
    """At density 1, unrounded, every switch leaves DDP's training as it is; at 5% replicas stay replicas."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model, optimizer = _made(make, density=1.0, factor_masking=False, **UNROUNDED)
        _train_with(model, optimizer, ORDER if name == "SGD" else [DENSE])
        found[name] = distance(weights(_stock(make)), weights(model))
        for views in (False, True):
            model, optimizer = _made(make, views=views)
            found[f"{name}, replicas, {views}"] = _train_with(model, optimizer, ORDER)
            left = optimizer.residual_state_dict()["tensors"].values()
            found[f"{name}, left, {views}"] = sum(float(abs(x).sum()) for arrays in left for x in arrays.values())
    return found


def _train_with(model: Any, optimizer: Any, modes: Sequence[str]) -> list[str]:
    """`STEPS` steps, a mode after the other; fingerprints after each."""
    seen = []
    for step, (x, y) in enumerate(batches(STEPS, dist.get_rank())):
        take(optimizer, modes[step * len(modes) // STEPS])
        _step(model, optimizer, x, y)
        seen.append(fingerprint(model))
    return seen


def choosing() -> dict[str, Any]:
    """A choice by the clock: the same on every rank, with what was said of it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dgc_horovod").addHandler(handler)
    model, optimizer = _made(mode=None, density=0.01)
    trial, modes = session(optimizer).strategy.choice.trial, []
    for x, y in batches(3 * (SETTLING + MOST_TIMED) + 1, dist.get_rank()):
        modes.append(trial.mode)
        _step(model, optimizer, x, y)
    logging.getLogger("dgc_horovod").removeHandler(handler)
    stats = optimizer.compression_stats()
    return {
        "modes": modes, "ended": trial.ended, "seconds": trial.seconds, "weights": fingerprint(model),
        "steps": stats["steps"], "told": dist.get_rank() > 0 or any("DDP " in text for text in said),
    }  # fmt: skip


def resuming() -> dict[str, Any]:
    """Saved and loaded in each state: the rest of the run is the uninterrupted one, bit for bit."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        for mode in (DENSE, EARLIER_FP16, COMPRESSED):
            ends = []
            for stops in (False, True):
                model, optimizer = _made(make)
                for step, (x, y) in enumerate(batches(STEPS, dist.get_rank())):
                    if step == STEPS // 3:
                        take(optimizer, DENSE if mode == EARLIER_FP16 else mode)
                    if stops and step == 2 * STEPS // 3:
                        path = os.path.join(os.environ["DGC_TEST_FOLDER"], f"{name}.{mode}")
                        if mode == EARLIER_FP16:  # what earlier versions wrote where fp16 was chosen
                            session(optimizer).strategy.choice.trial.mode = mode
                        save_checkpoint(path, model, optimizer)
                        model, optimizer = _made(make, mode=None)
                        load_checkpoint(path, model, optimizer)
                    _step(model, optimizer, x, y)
                ends.append(fingerprint(model))
            found[f"{name}, {mode}"] = [ends[0] == ends[1], session(optimizer).strategy.choice.trial.mode, ends[1]]
    return found


def habits() -> dict[str, Any]:
    """Scripts that DDP runs: two exchanged backward passes a step; a GradScaler that skips; hooks after loading."""
    model, optimizer = _made(mode=None, density=0.01)
    for x, y in batches(3 * (SETTLING + MOST_TIMED), dist.get_rank()):
        optimizer.zero_grad()
        for half in (slice(8), slice(8, None)):
            F.mse_loss(model(x[half]), y[half]).backward()
        optimizer.step()
    trial = session(optimizer).strategy.choice.trial
    twice = [trial.ended, COMPRESSED in trial.seconds, fingerprint(model)]
    model, optimizer = _made(mode=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the first steps overflow
    for x, y in batches(10, dist.get_rank()):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    scaled = [session(optimizer).strategy.choice.script_accumulates, scaler.get_scale() < 2.0**127]
    counts = []
    for mode in (DENSE, COMPRESSED):
        model, optimizer = _made(mode=mode)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        optimizer.load_state_dict(optimizer.state_dict())
        for x, y in batches(3, dist.get_rank()):
            _step(model, optimizer, x, y)
        counts.append(len(calls))
    return {"twice": twice, "scaled": scaled, "hooks": counts}


def given_back() -> dict[str, Any]:
    """A model that was compressed, or trained with local steps, and is DDP's own again; the first optimizer lives."""
    found = {}
    for name, first in {"local": Compression.local(steps=4), "dgc": Compression.dgc(0.05)}.items():
        for theirs in (Compression.none, Compression.fp16):
            model = DistributedDataParallel(smooth_model())
            before = register(model, _sgd(model), first)
            optimizer = register(model, _sgd(model), theirs)
            for x, y in batches(STEPS, dist.get_rank()):
                _step(model, optimizer, x, y)
            halves = theirs is Compression.fp16
            same = _is_same(model, _stock(_sgd, halves), halves)
            found[f"{name}, {theirs}"] = [same, fingerprint(model), "wrapped by another" in error_of(before.step)]
    return found


def cannot() -> dict[str, Any]:
    """What cannot be compressed is DDP's alone, with a warning; without DDP there is nothing to compare with."""
    model = DistributedDataParallel(smooth_model())
    damped = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)
    optimizer = register(model, damped, Compression.auto())
    for x, y in batches(3, dist.get_rank()):
        _step(model, optimizer, x, y)
    plain = smooth_model()
    return {
        "ours": hasattr(optimizer, "compression_stats"),
        "weights": fingerprint(model),
        "plain": error_of(lambda: DistributedOptimizer(_sgd(plain), plain.named_parameters(), Compression.auto())),
    }
