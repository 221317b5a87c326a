"""AdamW whose second moment is learnt in dense steps and stays."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.core.second_moment import FLOOR
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, smooth_model, train, weights

DENSE, BETAS = 30, (0.9, 0.95)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As stock Horovod has it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.01)


def wrapped(model: nn.Module, op: Any = hvd.Average, **settings: Any) -> Any:
    """The same, with dense steps and then a second moment that stays."""
    warmup = WarmupSchedule(steps=DENSE, first_density=1.0, factor=1e-3)
    config = Compression.dgc(density=0.05, warmup=warmup, **settings)
    made = DistributedOptimizer(adamw(model), named_parameters=model.named_parameters(), compression=config, op=op)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def dense_steps() -> dict[str, Any]:
    """The dense steps beside stock Horovod; then what each rank has of the moments."""
    hvd.init()
    model = smooth_model()
    stock = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    dense, ours = weights(model), smooth_model()
    optimizer = wrapped(ours, **UNROUNDED)
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
        "of second": bits(second), "of first": bits(first),
        "replica": fingerprint(ours), "losses": [losses[DENSE], sum(losses[-5:]) / 5],
    }  # fmt: skip


def bits(x: torch.Tensor) -> str:
    """The bits of a vector."""
    return x.numpy().tobytes().hex()[:4096]


def faults() -> dict[str, Any]:
    """Gradients that are not finite in dense steps, at the first that is not, and later; a residual that overflows."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    weight, at = model[0].weight, [0]
    bad = (DENSE - 1, DENSE, DENSE + 3) if hvd.rank() == 1 else ()
    weight.register_hook(lambda grad: grad * float("nan") if at[0] in bad else grad)
    train(model, optimizer, DENSE + 10, before_backward=lambda step: at.__setitem__(0, step))
    at[0] = 0
    steps = int(optimizer.state[weight]["step"])
    before = second_of(optimizer)
    for engine in optimizer._dgc.buckets.engines:
        engine.clear()  # as where a residual leaves the range of fp32
    train(model, optimizer, 5)
    return {
        "steps": steps, "same": bool(torch.equal(before, second_of(optimizer))), "replica": fingerprint(model),
        "finite": bool(torch.isfinite(weights(model)).all()),
    }  # fmt: skip


def second_of(optimizer: Any) -> torch.Tensor:
    """The second moment that an optimizer keeps."""
    (engine,) = [each for each in optimizer._dgc.buckets.engines if not each.bucket.uncompressed]
    return torch.as_tensor(engine.state.moments[1]).clone()


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


def rare() -> dict[str, Any]:
    """How far a step moves rows that had no gradient in the dense steps, in learning rates; a layer that had none."""
    hvd.init()
    model = Rare()
    optimizer, lr = wrapped(model), 1e-3
    draw, moved, rows = torch.Generator().manual_seed(hvd.rank()), 0.0, model.rows.weight

    def step(first: int, late: bool) -> None:
        optimizer.zero_grad()
        model(torch.randint(first, first + 32, (16,), generator=draw), late).square().mean().backward()
        optimizer.step()

    for _ in range(DENSE):
        step(0, False)
    for _ in range(20):
        before = rows.detach().clone()
        step(32, False)
        moved = max(moved, float((rows.detach() - before * (1 - 0.01 * lr)).abs().max()) / lr)
    return {"rows": moved, "late": error_of(lambda: step(32, True))}


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


def nodes() -> dict[str, Any]:
    """On two nodes of two, each of whose workers keeps half of the moments."""
    hvd.init()
    model = smooth_model()
    stock = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    dense, ours = weights(model), smooth_model()
    optimizer = wrapped(ours, exchange="hierarchical", **UNROUNDED)
    train(ours, optimizer, DENSE)
    apart = distance(dense, weights(ours))
    losses = train(ours, optimizer, 3 * DENSE)
    return {"apart": apart, "kept": second_of(optimizer).numel(), "replica": fingerprint(ours), "losses": losses}


def summed() -> list[list[float]]:
    """How far each of the last dense steps and the first of the others goes, averaged and summed.

    Adam divides a sum of gradients by a second moment of sums: both must go as far.
    """
    hvd.init()
    found = []
    for op in (hvd.Average, hvd.Sum):
        model, moved = smooth_model(), []
        optimizer = wrapped(model, op, **UNROUNDED)
        kept = [weights(model)]

        def look(_: int, model: Any = model, kept: list[torch.Tensor] = kept, moved: list[float] = moved) -> None:
            now = weights(model)
            moved.append(float((now - kept[0]).norm()))
            kept[0] = now

        train(model, optimizer, DENSE + 6, after_step=look)
        train(model, optimizer, 30)
        optimizer.flush()
        found.append([*moved[DENSE - 3 :], float(optimizer.state[model[0].weight]["exp_avg"].norm())])
    return found


def skipped() -> float:
    """The second moment after dense steps of which four were skipped, in terms of stock's without them."""
    hvd.init()
    found = []
    for wraps in (lambda model: hvd.DistributedOptimizer(adamw(model), model.named_parameters()), wrapped):
        model = smooth_model()
        optimizer = wraps(model)
        for step, (x, y) in enumerate(batches(20, hvd.rank())):
            optimizer.zero_grad()
            if wraps is not wrapped and step < 4:
                continue
            bad = float("nan") if step < 4 and hvd.rank() == 1 else 1.0
            (bad * nn.functional.mse_loss(model(x), y)).backward()
            optimizer.step()
        found.append(float(sum(optimizer.state[p]["exp_avg_sq"].double().sum() for p in model.parameters())))
    return found[1] / found[0]
