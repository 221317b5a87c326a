"""AdamW whose dense steps end once its second moment has settled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule, load_checkpoint, save_checkpoint
from dgc_horovod.torch.elastic import TorchState
from tests.helpers.training import fingerprint, smooth_model, train
from tests.parallel.cases.frozen_adam import BETAS, adamw

WINDOW = round(1 / (1 - BETAS[1]))
CHANGE, LONGEST, STAGES = 0.3, 150, 2
ANY, NONE = 1e9, 1e-9  # changes that count as settled


def wrapped(model: nn.Module, change: float | None = CHANGE, longest: int = LONGEST) -> Any:
    """Dense for at most so many steps, then as many at half the density, then 5%."""
    warmup = WarmupSchedule(steps=STAGES * longest, first_density=1.0, factor=0.1, until_settled=change)
    config = Compression.dgc(density=0.05, warmup=warmup, check_every=0)
    made = DistributedOptimizer(adamw(model), named_parameters=model.named_parameters(), compression=config)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def dense_steps(optimizer: Any, model: nn.Module, steps: int, before: Callable[[int], None] = lambda step: None) -> int:
    """Train; how many steps were at density 1."""
    densities: list[float] = []

    def look(step: int) -> None:
        densities.append(optimizer._dgc.buckets.density())
        before(step)

    train(model, optimizer, steps, before_backward=look)
    return densities.count(1.0)


def ends() -> dict[str, Any]:
    """Where the dense steps end, and the same run with as many by number."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    found = dense_steps(optimizer, model, 2 * LONGEST)
    other = smooth_model()
    by_number = wrapped(other, None, found)
    assert dense_steps(by_number, other, 2 * LONGEST) == found
    return {"steps": found, "replica": fingerprint(model), "by number": fingerprint(other)}


def limits() -> dict[str, int]:
    """Dense steps where any change counts as settled, where none does, with skipped steps, and while the rate rises."""
    hvd.init()
    found = {}
    for name, change in (("any", ANY), ("none", NONE), ("skipped", ANY), ("ramp", ANY), ("own norm", ANY)):
        model = smooth_model()
        optimizer = wrapped(model, change, 100)
        weight, at = model[0].weight, [0]
        bad = (12, 13, WINDOW) if name == "skipped" and hvd.rank() == 1 else ()
        weight.register_hook(lambda grad, at=at, bad=bad: grad * float("nan") if at[0] in bad else grad)

        def before(step: int, name: str = name, optimizer: Any = optimizer, at: list[int] = at) -> None:
            at[0] = step
            if name == "ramp":
                optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / (3 * WINDOW))
            if name == "own norm" and hvd.rank() == 1:  # as if its processor added otherwise, and far worse
                for state in optimizer.state.values():
                    state["exp_avg_sq"].mul_(2)

        found[name] = dense_steps(optimizer, model, 120, before)
    return found


def resumed() -> dict[str, list[str]]:
    """Interrupted before the first window is full, in the second, just before it has settled, and after that."""
    hvd.init()
    model = smooth_model()
    settled = dense_steps(wrapped(model), model, LONGEST)
    found: dict[str, list[str]] = {}
    for at in (WINDOW // 2, WINDOW + 5, settled - 3, settled, settled + 5):
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
            rest = dense_steps(optimizer, model, settled)
            found.setdefault(str(at), []).append(f"{rest} {fingerprint(model)}")
    return found


def handed_on() -> dict[str, Any]:
    """A commit that is gone back to; a rank in join meanwhile; a checkpoint whose residuals are left."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, ANY)
    settling = optimizer._dgc.buckets.settling
    state = TorchState(model=model, optimizer=optimizer)
    train(model, optimizer, WINDOW + 10)
    state.save()
    measured = [list(each) for each in settling.measured]
    train(model, optimizer, WINDOW)
    found: dict[str, Any] = {"settled": settling.settled_at}
    state.restore()
    settling = optimizer._dgc.buckets.settling
    found["restored"] = [settling.settled_at, settling.measured == measured]
    state.sync()
    train(model, optimizer, 4 + 12 * hvd.rank())  # the last of them are not measured
    hvd.join()
    settling = optimizer._dgc.buckets.settling
    found["joined"] = settling.settled_at
    train(model, optimizer, WINDOW)
    found["after"] = [settling.settled_at, fingerprint(model)]
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    for residuals in ("required", "ignored"):
        other = smooth_model(1)
        resumed = wrapped(other, ANY)
        load_checkpoint(os.environ["DGC_TEST_FOLDER"], other, resumed, residuals=residuals)
        found[residuals] = resumed._dgc.buckets.settling.settled_at
    return found


def saved() -> int:
    """Saved once it has settled, for another number of ranks."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, ANY)
    train(model, optimizer, 3 * WINDOW)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    return int(optimizer._dgc.buckets.settling.settled_at)


def loaded() -> list[float]:
    """Gone on with by another number of ranks: where it had settled, the density, finite weights."""
    hvd.init()
    model = smooth_model(1)
    optimizer = wrapped(model, ANY)
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    density = optimizer._dgc.buckets.density()
    train(model, optimizer, 5)
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return [optimizer._dgc.buckets.settling.settled_at, density, finite]
