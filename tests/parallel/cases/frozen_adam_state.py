"""What AdamW's frozen second moment is where a state is saved, loaded, flushed and handed on."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.torch import load_checkpoint, save_checkpoint
from dgc_horovod.torch.elastic import TorchState
from tests.helpers.errors import error_of
from tests.helpers.training import fingerprint, smooth_model, train
from tests.parallel.cases.frozen_adam import BETAS, DENSE, bits, second_of, wrapped


def state() -> dict[str, Any]:
    """Interrupted in the dense steps and after them, and then flushed: stock's state is complete again."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, at in (("dense", DENSE // 2), ("frozen", DENSE + 5)):
        runs = []
        for interrupted in (False, True):
            model = smooth_model()
            optimizer = wrapped(model)
            train(model, optimizer, at)
            if interrupted:
                kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
                other = smooth_model(1)
                other.load_state_dict(model.state_dict())
                model, optimizer = other, wrapped(other)
                optimizer.load_state_dict(saved)
                optimizer.load_residual_state_dict(kept)
            train(model, optimizer, 2 * DENSE)
            runs.append(fingerprint(model))
        found[name] = runs
    (engine,) = [each for each in optimizer._dgc.buckets.engines if not each.bucket.uncompressed]
    second = float(torch.as_tensor(engine.state.moments[1]).double().sum())
    optimizer.flush()
    moments = [state["exp_avg_sq"] for p, state in optimizer.state.items() if p.dim() > 1 and p.numel() >= 1024]
    steps = {int(state["step"]) for state in optimizer.state.values()}
    bias = 1 - BETAS[1] ** max(steps)
    found["second"] = float(sum(x.double().sum() for x in moments)) / bias / second
    found["steps"], found["replica"] = sorted(steps), fingerprint(model)
    train(model, optimizer, 5)
    (engine,) = [each for each in optimizer._dgc.buckets.engines if not each.bucket.uncompressed]
    found["after flush"] = float(torch.as_tensor(engine.state.moments[1]).double().sum()) / second
    return found


def looked_at() -> dict[str, str]:
    """A state that one rank alone asks for changes nothing."""
    hvd.init()
    found = {}
    for name, asks in (("not", ()), ("asked", (DENSE - 2, DENSE + 2, DENSE + 5))):
        model = smooth_model()
        optimizer = wrapped(model)

        def ask(step: int, optimizer: Any = optimizer, asks: tuple[int, ...] = asks) -> None:
            if hvd.rank() == 0 and step in asks:
                optimizer.state_dict()

        train(model, optimizer, 2 * DENSE, after_step=ask)
        found[name] = fingerprint(model)
    return found


def misuse() -> dict[str, str]:
    """Residuals without the optimizer's state; with the other second moment."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, DENSE + 5)
    kept = optimizer.residual_state_dict()
    other = smooth_model()
    alone = wrapped(other)
    alone.load_residual_state_dict(kept)
    own = wrapped(smooth_model(), second_moment="own")
    return {
        "no state": error_of(lambda: train(other, alone, 1)),
        "own": error_of(lambda: own.load_residual_state_dict(kept)),
    }


def saved() -> dict[str, Any]:
    """Saved after the dense steps, for another number of ranks."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, DENSE + 10)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    return {"replica": fingerprint(model), "second": bits(second_of(optimizer))}


def loaded() -> dict[str, Any]:
    """Gone on with by another number of ranks."""
    hvd.init()
    model = smooth_model(1)
    optimizer = wrapped(model)
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    before = fingerprint(model)
    losses = train(model, optimizer, 20)
    return {
        "before": before, "replica": fingerprint(model), "second": bits(second_of(optimizer)), "losses": losses,
    }  # fmt: skip


def handed_on() -> dict[str, Any]:
    """A record that was loaded and is saved again; elastic's state; then a join, and a checkpoint after it."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, DENSE + 5)
    kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
    once, twice = wrapped(smooth_model()), wrapped(smooth_model())
    for to in (once, twice):
        to.load_state_dict(saved)
        to.load_residual_state_dict(kept)
        kept = to.residual_state_dict()
    found: dict[str, Any] = {"parts": sorted({part for parts in kept["tensors"].values() for part in parts})}
    state = TorchState(model=model, optimizer=optimizer)
    for act in (state.sync, state.restore, state.save, state.restore):
        act()
    train(model, optimizer, 3 + hvd.rank())
    hvd.join()
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    other = smooth_model(1)
    resumed = wrapped(other)
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], other, resumed)
    found["loaded"] = fingerprint(other) == fingerprint(model)
    losses = train(other, resumed, 20)
    return found | {"replica": fingerprint(other), "second": bits(second_of(resumed)), "losses": losses}
