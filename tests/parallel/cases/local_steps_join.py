"""Local steps of ranks that have different numbers of batches."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.training import batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights
from tests.parallel.cases.local_steps import WHOLE, H, _adamw, wrapped

STEPS = [H + 2, 3 * H, 2 * H + 1]  # of each rank; rank 0 ends within a round, rank 1 right after an exchange


def averaging() -> dict[str, Any]:
    """At density 1 it is the mean of all ranks' weights, of which some have changed less, or nothing any more."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, outer_momentum=0.0, **WHOLE)
    own = STEPS[hvd.rank()]
    train(model, optimizer, own)
    last = hvd.join()
    found = {"last": last, "apart": distance(_alone(), weights(model)), "exchanges": session(optimizer).exchange.steps}
    inner = int(optimizer.state[next(model.parameters())]["step"])
    train(model, optimizer, H)
    found |= {"own": inner == own, "in the round": session(optimizer).exchange.counts.pending}
    return {**found, "replica": fingerprint(model)}


def _alone() -> torch.Tensor:
    """What the ranks come to, all of them in this process."""
    models = [smooth_model() for _ in STEPS]
    inner, data = [_adamw(model) for model in models], [iter(batches(own, i)) for i, own in enumerate(STEPS)]
    for begun in range(0, max(STEPS), H):
        for model, optimizer, own, mine in zip(models, inner, STEPS, data, strict=True):
            for _ in range(min(H, max(0, own - begun))):
                x, y = next(mine)
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        mean = torch.stack([weights(model) for model in models]).mean(0)
        for model in models:
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return mean


def around() -> dict[str, Any]:
    """Two epochs at 10% with momentum and a schedule; in each, not finite changes while ranks are in join."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, outer_momentum=0.5, check_every=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    ends = []
    bad = hvd.rank() == 1

    def spoil(step: int) -> None:
        if bad and step == 3 * H - 1:
            model[0].weight.data[0, 0] = float("nan")

    for _ in range(2):
        train(
            model, optimizer, STEPS[hvd.rank()], after_step=lambda _: scheduler.step(),
            before_backward=spoil,
        )  # fmt: skip
        x, y = next(iter(batches(1, hvd.rank())))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        before = [p.grad for p in model.parameters()]
        last = hvd.join()
        kept = all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
        scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), last))
        ends.append([last, kept, fingerprint(model), optimizer.param_groups[0]["lr"]])
    finite = bool(weights(model).isfinite().all())
    return {"ends": ends, "finite": finite, "skipped": optimizer.compression_stats()["skipped"]}


def beside_another() -> dict[str, Any]:
    """Another optimizer exchanges at each step."""
    hvd.init()
    first, second = smooth_model(), smooth_model(1)
    rounds = wrapped(first)
    each = DistributedOptimizer(momentum_sgd(second), second.named_parameters(), Compression.dgc(0.05, min_numel=16))
    for _ in range(STEPS[hvd.rank()]):
        train(first, rounds, 1)
        train(second, each, 1)
    last = hvd.join()
    steps = [optimizer.compression_stats()["steps"] for optimizer in (rounds, each)]
    return {"last": last, "steps": steps, "replicas": [fingerprint(first), fingerprint(second)]}


def at_once() -> dict[str, Any]:
    """All join after as many steps: it is as `exchange` does."""
    hvd.init()
    ends = []
    for joins in (False, True):
        model = smooth_model()
        optimizer = wrapped(model)
        train(model, optimizer, H + 2)
        if joins:
            hvd.join()
        else:
            optimizer.exchange()
        train(model, optimizer, H)
        ends.append([fingerprint(model), optimizer.compression_stats()["steps"]])
        del optimizer
    return {"ends": ends}
