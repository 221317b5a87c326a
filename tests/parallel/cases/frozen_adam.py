"""AdamW whose second moment is learnt in dense steps and stays."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule, load_checkpoint, save_checkpoint
from dgc_horovod.torch.updates.adam import FLOOR
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, distance, fingerprint, smooth_model, train, weights

DENSE, BETAS = 30, (0.9, 0.95)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.01)


def _wrapped(model: nn.Module, **settings: Any) -> Any:
    warmup = WarmupSchedule(steps=DENSE, first_density=1.0, factor=1e-3)
    config = Compression.dgc(density=0.05, warmup=warmup, **settings)
    made = DistributedOptimizer(_adamw(model), named_parameters=model.named_parameters(), compression=config)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def dense_steps() -> dict[str, Any]:
    """The dense steps beside stock Horovod; then what each rank has of the moments."""
    hvd.init()
    model = smooth_model()
    stock = hvd.DistributedOptimizer(_adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    dense, ours = weights(model), smooth_model()
    optimizer = _wrapped(ours, **UNROUNDED)
    apart: list[float] = []

    def look(step: int) -> None:
        if step == DENSE - 1:
            apart.append(distance(dense, weights(ours)))

    losses = train(ours, optimizer, 4 * DENSE, after_step=look)
    (engine,) = [each for each in optimizer._dgc.buckets.engines if not each.bucket.uncompressed]
    first, second = (torch.as_tensor(moment) for moment in engine.state.moments)
    by_name = {segment.name: second[segment.place] for segment in engine.bucket.segments}
    found = [by_name[name] for name, _ in model.named_parameters() if name in by_name]
    theirs = [stock.state[p]["exp_avg_sq"].flatten() for name, p in model.named_parameters() if name in by_name]
    sought = [x.clamp(min=FLOOR * float(x.mean())) / (1 - BETAS[1] ** DENSE) for x in theirs]
    return {
        "apart": apart[0], "second": distance(torch.cat(sought), torch.cat(found)),
        "of second": fingerprint_of(second), "of first": fingerprint_of(first),
        "replica": fingerprint(ours), "losses": [losses[DENSE], sum(losses[-5:]) / 5],
    }  # fmt: skip


def fingerprint_of(x: torch.Tensor) -> str:
    """The bits of a vector."""
    return x.numpy().tobytes().hex()[:4096]


def state() -> dict[str, Any]:
    """Interrupted in the dense steps and after them, and then flushed: stock's state is complete again."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, at in (("dense", DENSE // 2), ("frozen", DENSE + 5)):
        runs = []
        for interrupted in (False, True):
            model = smooth_model()
            optimizer = _wrapped(model)
            train(model, optimizer, at)
            if interrupted:
                kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
                other = smooth_model(1)
                other.load_state_dict(model.state_dict())
                model, optimizer = other, _wrapped(other)
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


def faults() -> dict[str, Any]:
    """Gradients that are not finite in dense steps, at the first that is not, and later; a residual that overflows."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model)
    weight, at = model[0].weight, [0]
    bad = (DENSE - 1, DENSE, DENSE + 3) if hvd.rank() == 1 else ()
    weight.register_hook(lambda grad: grad * float("nan") if at[0] in bad else grad)
    train(model, optimizer, DENSE + 10, before_backward=lambda step: at.__setitem__(0, step))
    at[0] = 0
    steps = int(optimizer.state[weight]["step"])
    before = _second(optimizer)
    for engine in optimizer._dgc.buckets.engines:
        engine.clear()  # as where a residual leaves the range of fp32
    train(model, optimizer, 5)
    return {
        "steps": steps, "same": bool(torch.equal(before, _second(optimizer))), "replica": fingerprint(model),
        "finite": bool(torch.isfinite(weights(model)).all()),
    }  # fmt: skip


def _second(optimizer: Any) -> torch.Tensor:
    (engine,) = [each for each in optimizer._dgc.buckets.engines if not each.bucket.uncompressed]
    return torch.as_tensor(engine.state.moments[1]).clone()


def looked_at() -> dict[str, str]:
    """A state that one rank alone asks for changes nothing."""
    hvd.init()
    found = {}
    for name, asks in (("not", ()), ("asked", (DENSE - 2, DENSE + 2, DENSE + 5))):
        model = smooth_model()
        optimizer = _wrapped(model)

        def ask(step: int, optimizer: Any = optimizer, asks: tuple[int, ...] = asks) -> None:
            if hvd.rank() == 0 and step in asks:
                optimizer.state_dict()

        train(model, optimizer, 2 * DENSE, after_step=ask)
        found[name] = fingerprint(model)
    return found


class Rare(nn.Module):
    """Rows of an embedding, and a whole layer, that come after the dense steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out, self.late = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, which: torch.Tensor, late: bool) -> torch.Tensor:
        """With or without the layer."""
        x = torch.tanh(self.out(self.rows(which)))
        return self.late(x) if late else x


def rare() -> dict[str, float]:
    """How far a step moves what had no gradient in the dense steps, in learning rates."""
    hvd.init()
    model = Rare()
    optimizer, lr = _wrapped(model), 1e-3
    draw = torch.Generator().manual_seed(hvd.rank())
    moved = {"rows": 0.0, "late": 0.0}
    for step in range(DENSE + 20):
        optimizer.zero_grad()
        late = step >= DENSE
        which = torch.randint(32, 64, (16,), generator=draw) if late else torch.randint(0, 32, (16,), generator=draw)
        before = {name: getattr(model, name).weight.detach().clone() for name in moved}
        model(which, late).square().mean().backward()
        optimizer.step()
        if late:
            for name, old in before.items():
                change = (getattr(model, name).weight.detach() - old * (1 - 0.01 * lr)).abs().max()
                moved[name] = max(moved[name], float(change) / lr)
    return moved


def coupled() -> float:
    """Adam with weight decay in the gradient, in dense steps beside stock Horovod."""
    hvd.init()
    after = []
    for wraps in (hvd.DistributedOptimizer, DistributedOptimizer):
        model = smooth_model()
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)
        warmup = WarmupSchedule(steps=DENSE, first_density=1.0, factor=1e-3)
        ours = {"compression": Compression.dgc(density=0.05, warmup=warmup, **UNROUNDED)}
        more = ours if wraps is DistributedOptimizer else {}
        train(model, wraps(adam, named_parameters=model.named_parameters(), **more), DENSE)
        after.append(weights(model))
    return distance(*after)


def misuse() -> dict[str, str]:
    """Residuals without the optimizer's state; with the other second moment."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model)
    train(model, optimizer, DENSE + 5)
    kept = optimizer.residual_state_dict()
    other = smooth_model()
    alone = _wrapped(other)
    alone.load_residual_state_dict(kept)
    own = _wrapped(smooth_model(), second_moment="own")
    return {
        "no state": error_of(lambda: train(other, alone, 1)),
        "own": error_of(lambda: own.load_residual_state_dict(kept)),
    }


def saved() -> dict[str, Any]:
    """Saved after the dense steps, for another number of ranks."""
    hvd.init()
    model = smooth_model()
    optimizer = _wrapped(model)
    train(model, optimizer, DENSE + 10)
    save_checkpoint(os.environ["STATE_FOLDER"], model, optimizer)
    return {"replica": fingerprint(model), "second": fingerprint_of(_second(optimizer))}


def loaded() -> dict[str, Any]:
    """Gone on with by another number of ranks."""
    hvd.init()
    model = smooth_model(1)
    optimizer = _wrapped(model)
    load_checkpoint(os.environ["STATE_FOLDER"], model, optimizer)
    before = fingerprint(model)
    losses = train(model, optimizer, 20)
    return {
        "before": before, "replica": fingerprint(model), "second": fingerprint_of(_second(optimizer)), "losses": losses,
    }  # fmt: skip


def nodes() -> dict[str, Any]:
    """On two nodes of two, each of whose workers keeps half of the moments."""
    hvd.init()
    model = smooth_model()
    stock = hvd.DistributedOptimizer(_adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    dense, ours = weights(model), smooth_model()
    optimizer = _wrapped(ours, exchange="hierarchical", **UNROUNDED)
    train(ours, optimizer, DENSE)
    apart = distance(dense, weights(ours))
    losses = train(ours, optimizer, 3 * DENSE)
    return {"apart": apart, "kept": _second(optimizer).numel(), "replica": fingerprint(ours), "losses": losses}
