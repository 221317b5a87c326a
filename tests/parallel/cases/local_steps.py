"""Local steps on real ranks: what is exchanged, what is kept, what goes wrong."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, smooth_model, train, weights

H = 5
WHOLE: dict[str, Any] = {"density": 1.0, "local_decay": 1.0, **UNROUNDED}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **fields: Any) -> Any:
    """AdamW with local steps, 10% in 2 bits."""
    settings = {"steps": H, "density": 0.1, "min_numel": 64, **fields}
    made = DistributedOptimizer(
        optimizer or _adamw(model),
        named_parameters=model.named_parameters(),
        compression=Compression.local(**settings),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def averaging() -> dict[str, float]:
    """At density 1: each rank trains alone, and every H steps the weights become their mean."""
    hvd.init()
    found = {}
    for name, momentum, rate in (("mean", 0.0, 1.0), ("Nesterov", 0.9, 0.7)):
        model, alone = smooth_model(), smooth_model()
        optimizer = wrapped(model, outer_momentum=momentum, outer_rate=rate, **WHOLE)
        train(model, optimizer, 4 * H)
        inner = _adamw(alone)
        data, anchor, outer = iter(batches(4 * H, hvd.rank())), weights(alone), torch.zeros(())
        for step in range(4 * H):
            inner.zero_grad()
            x, y = next(data)
            nn.functional.mse_loss(alone(x), y).backward()
            inner.step()
            if (step + 1) % H == 0:
                change = hvd.allreduce(anchor - weights(alone), name=f"{name}.{step}")
                outer = momentum * outer + change
                anchor = anchor - rate * (change + momentum * outer if momentum else change)
                nn.utils.vector_to_parameters(anchor, alone.parameters())
                anchor = weights(alone)
        found[name] = distance(weights(alone), weights(model))
    return found


def learning() -> dict[str, Any]:
    """A run at 10%, 2 bits: replicas, learning, traffic."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    after: list[str] = []

    def look(step: int) -> None:
        if step % H in (H - 1, 1):
            after.append(fingerprint(model))

    losses = train(model, optimizer, 60 * H, after_step=look)
    stats = optimizer.compression_stats()
    return {
        "after": after, "first": losses[0], "last": sum(losses[-20:]) / 20, "exchanges": stats["steps"],
        "fewer": stats["bytes_dense_received"] / stats["bytes_received"],
    }  # fmt: skip


def conservation() -> dict[str, float]:
    """What the weights have moved by, and what waits, is what the inner steps have changed."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, local_decay=1.0, outer_momentum=0.0, values="fp32", dense_values="fp32")
    begun, inner = weights(model), torch.zeros(())
    last = begun.clone()
    rounds = session(optimizer).strategy.rounds
    assert rounds is not None
    send, receive = rounds.send, rounds.receive

    def sending() -> bool:
        nonlocal inner
        inner = inner + (weights(model) - last)
        return send()

    def receiving() -> bool:
        nonlocal last
        finite = receive()
        last = weights(model)
        return finite

    rounds.send, rounds.receive = sending, receiving  # type: ignore[method-assign]
    train(model, optimizer, 10 * H)
    state = optimizer.residual_state_dict()["tensors"]
    waits = torch.cat([state.get(name, {}).get("v", torch.zeros(p.numel())) for name, p in model.named_parameters()])
    moved = hvd.allreduce(weights(model) - begun, name="moved")
    made = hvd.allreduce(inner, name="made")
    owed = hvd.allreduce(waits, name="owed")
    before = fingerprint(model)
    optimizer.flush()
    return {
        "apart": distance(made, moved - owed), "owed": float(owed.norm() / made.norm()),
        "flushed": distance(made, weights(model) - begun), "changed": float(fingerprint(model) != before),
    }  # fmt: skip


def faults() -> dict[str, Any]:
    """A rank whose weights are not finite: nobody moves, and training goes on."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, 2 * H)
    before = fingerprint(model)

    def spoil(step: int) -> None:
        if hvd.rank() == 1 and step == 1:
            model[0].weight.data[0, 0] = float("nan")

    train(model, optimizer, H, after_step=spoil)
    stayed = fingerprint(model) == before
    losses = train(model, optimizer, 10 * H)
    return {"stayed": stayed, "replica": fingerprint(model), "last": losses[-1], "moved": fingerprint(model) != before}


def resumed() -> dict[str, Any]:
    """Saved in the middle of a round, which ends it, and resumed; SGD and AdamW, with outer momentum."""
    hvd.init()
    found: dict[str, Any] = {}
    kinds = {
        "AdamW": _adamw,
        "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    }
    for name, make in kinds.items():
        folder = os.path.join(os.environ["DGC_TEST_FOLDER"], name)
        model = smooth_model()
        optimizer = wrapped(model, make(model), outer_momentum=0.5, outer_rate=0.7)
        train(model, optimizer, 3 * H + 2)
        save_checkpoint(folder, model, optimizer)
        at_save = fingerprint(model)
        other = smooth_model(1)
        resumed = wrapped(other, make(other), outer_momentum=0.5, outer_rate=0.7)
        load_checkpoint(folder, other, resumed)
        loaded = fingerprint(other)
        train(model, optimizer, 3 * H)
        train(other, resumed, 3 * H)
        found[name] = [at_save == loaded, fingerprint(model) == fingerprint(other), fingerprint(model)]
    return found


def misuse() -> dict[str, str]:
    """What cannot be, in words."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, 2)
    found = {
        "residuals": error_of(optimizer.residual_state_dict),
        "sum": error_of(
            lambda: DistributedOptimizer(_adamw(smooth_model()), compression=Compression.local(), op=hvd.Sum)
        ),
    }
    optimizer.exchange()
    found["then"] = error_of(optimizer.residual_state_dict)
    return found


def scaled() -> dict[str, Any]:
    """Under a GradScaler, one of whose ranks skips a step: rounds stay together."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), lr=0.02))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for step, (x, y) in enumerate(batches(6 * H, hvd.rank())):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss * (float("inf") if hvd.rank() == 1 and step == 7 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return {
        "replica": fingerprint(model), "exchanges": optimizer.compression_stats()["steps"], "scale": scaler.get_scale(),
        "first": losses[0], "last": losses[-1],
    }  # fmt: skip
