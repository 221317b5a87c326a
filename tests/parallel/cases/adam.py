"""AdamW with a second moment that all ranks share."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, smooth_model, train, weights

DENSE, BETAS = 30, (0.9, 0.95)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As stock Horovod has it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.01)


def wrapped(model: nn.Module, dense: int = 0, op: Any = hvd.Average, **settings: Any) -> Any:
    """The same, compressed, after so many dense steps."""
    warmup = WarmupSchedule(steps=dense, first_density=1.0, factor=1e-3) if dense else None
    config = Compression.dgc(**{"density": 0.05, "warmup": warmup, **settings})
    made = DistributedOptimizer(adamw(model), named_parameters=model.named_parameters(), compression=config, op=op)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return made


def known(optimizer: Any) -> str:
    """The bits of what is known of second moments."""
    return session(optimizer).exchange.second.packed().tobytes().hex()


def _kept(optimizer: Any) -> torch.Tensor:
    """What a rank keeps of compressed tensors."""
    engines = [each for each in session(optimizer).exchange.engines if not each.bucket.uncompressed]
    return torch.cat([torch.as_tensor(each.state.v) for each in engines])


def dense_steps() -> dict[str, Any]:
    """The dense steps beside stock Horovod; what is known of its second moment after them; then the others."""
    hvd.init()
    model = smooth_model()
    stock = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    dense, ours = weights(model), smooth_model()
    optimizer = wrapped(ours, DENSE, **UNROUNDED)
    apart: list[float] = []

    def look(step: int) -> None:
        if step == DENSE - 1:
            apart.append(distance(dense, weights(ours)))

    losses = train(ours, optimizer, DENSE + 1, after_step=look)
    (p, name), second = (model[0].weight, "0.weight"), session(optimizer).exchange.second
    theirs = stock.state[p]["exp_avg_sq"] / (1 - BETAS[1] ** DENSE)
    found = torch.from_numpy(second[name].square()).view(p.shape)
    ratios = [float((theirs.mean(dim) / found.mean(dim)).log().abs().max()) for dim in (0, 1)]
    losses += train(ours, optimizer, 3 * DENSE)
    return {
        "apart": apart[0], "ratios": ratios, "known": known(optimizer), "own": _kept(optimizer).numpy().tobytes().hex(),
        "replica": fingerprint(ours), "losses": [losses[DENSE], sum(losses[-5:]) / 5],
    }  # fmt: skip


def first_steps() -> dict[str, Any]:
    """Compressed from the first step on, which moves no compressed weight: nothing is known of it yet."""
    hvd.init()
    model = smooth_model()
    before, optimizer = [p.detach().clone() for p in model.parameters()], wrapped(model, **UNROUNDED)
    losses = train(model, optimizer, 1)
    decayed = [x * (1 - 1e-3 * 0.01) for x in before]
    moved = [not torch.equal(p, x) for p, x in zip(model.parameters(), decayed, strict=True) if p.numel() >= 1024]
    losses += train(model, optimizer, 150)
    sent = optimizer.compression_stats()
    memory = sum(x.numel() * x.element_size() for p in model.parameters() for x in optimizer.state[p].values())
    memory += 4 * _kept(optimizer).numel()
    return {
        "moved": any(moved), "losses": losses, "replica": fingerprint(model), "known": known(optimizer),
        "bytes": sent["bytes_dense"] / sent["bytes_sent"],
        "memory": memory / sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def clipped() -> dict[str, Any]:
    """A script that clips from its first step on, of which the ranks' gradients differ much."""
    hvd.init()
    model = smooth_model()
    optimizer, found, limit = wrapped(model, min_numel=64), [], 0.1
    for i, (x, y) in enumerate(batches(6, hvd.rank())):
        optimizer.zero_grad()
        ((1 + 9 * hvd.rank()) * F.mse_loss(model(x), y)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        norm = session(optimizer).exchange.second.squares ** 0.5
        found.append([known(optimizer), norm / (limit * hvd.size() ** 0.5) if i == 0 else 0.0])
    return {"known": [each[0] for each in found], "norm": found[0][1], "replica": fingerprint(model)}


def faults() -> dict[str, Any]:
    """Gradients that are not finite in dense steps, at the first that is not, and later; a residual that overflows."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, DENSE)
    weight, at, seen = model[0].weight, [0], {}
    bad = (DENSE - 1, DENSE, DENSE + 3) if hvd.rank() == 1 else ()
    weight.register_hook(lambda grad: grad * float("nan") if at[0] in bad else grad)

    def before(step: int) -> None:
        at[0] = step
        seen[step] = known(optimizer)

    train(model, optimizer, DENSE + 10, before_backward=before)
    steps = session(optimizer).exchange.second["0.weight"].steps
    for engine in session(optimizer).exchange.engines:
        engine.clear()  # as where a residual leaves the range of fp32
    at[0] = 0
    train(model, optimizer, 5)
    return {
        "steps": steps, "learnt of it": seen[DENSE + 3] != seen[DENSE + 4], "replica": fingerprint(model),
        "finite": bool(torch.isfinite(weights(model)).all()),
    }  # fmt: skip


class Rare(nn.Module):
    """Rows of an embedding, and a whole layer, that have a gradient later only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.out, self.late = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, which: torch.Tensor, late: bool) -> torch.Tensor:
        """With or without the layer."""
        x = torch.tanh(self.out(self.rows(which)))
        return self.late(x) if late else x


def rare() -> dict[str, Any]:
    """How far a step moves what had no gradient in the steps before, in learning rates."""
    hvd.init()
    model = Rare()
    optimizer, lr = wrapped(model, min_numel=512), 1e-3
    draw, moved = torch.Generator().manual_seed(hvd.rank()), {"rows": 0.0, "late": 0.0}

    def step(first: int, late: bool) -> None:
        optimizer.zero_grad()
        model(torch.randint(first, first + 32, (16,), generator=draw), late).square().mean().backward()
        optimizer.step()

    for _ in range(DENSE):
        step(0, False)
    for name, p, late in (("rows", model.rows.weight, False), ("late", model.late.weight, True)):
        for _ in range(20):
            before = p.detach().clone()
            step(32, late)
            moved[name] = max(moved[name], float((p.detach() - before * (1 - 0.01 * lr)).abs().max()) / lr)
    return moved


def coupled() -> float:
    """Adam with weight decay in the gradient, in dense steps beside stock Horovod."""
    hvd.init()
    after = []
    for wraps in (hvd.DistributedOptimizer, DistributedOptimizer):
        model = smooth_model()
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=BETAS, weight_decay=0.1)
        ours = {"compression": Compression.dgc(density=1.0, **UNROUNDED)}
        more = ours if wraps is DistributedOptimizer else {}
        train(model, wraps(adam, named_parameters=model.named_parameters(), **more), DENSE)
        after.append(weights(model))
    return distance(*after)


def nodes() -> dict[str, Any]:
    """On two nodes of two, each of whose workers keeps half of the residual and measures half of each gradient."""
    hvd.init()
    flat, found = smooth_model(), {}
    alone = wrapped(flat, **UNROUNDED)
    train(flat, alone, 1)
    ours = smooth_model()
    optimizer = wrapped(ours, exchange="hierarchical", **UNROUNDED)
    train(ours, optimizer, 1)
    found["kept"] = _kept(optimizer).numel()
    one, other = (session(each).exchange.second.saved() for each in (alone, optimizer))
    pairs = zip(one.items(), other.values(), strict=True)
    # squares of a node's mean are less than those of its workers, in all rows alike but for chance
    found["levels"] = {
        name: [float(x[3:].mean()), float(y[3:].mean()), float(x[0]), float(y[0])] for (name, x), y in pairs
    }
    losses = train(ours, optimizer, 3 * DENSE)
    return found | {"replica": fingerprint(ours), "losses": losses, "known": known(optimizer)}


def summed() -> list[list[float]]:
    """How far each of the last dense steps and the first of the others goes, averaged and summed; what a flush gives.

    Adam divides a sum of gradients by a second moment of sums: both must go as far.
    """
    hvd.init()
    found = []
    for op in (hvd.Average, hvd.Sum):
        model, moved = smooth_model(), []
        optimizer = wrapped(model, DENSE, op, **UNROUNDED)
        kept = [weights(model)]

        def look(_: int, model: Any = model, kept: list[torch.Tensor] = kept, moved: list[float] = moved) -> None:
            now = weights(model)
            moved.append(float((now - kept[0]).norm()))
            kept[0] = now

        train(model, optimizer, DENSE + 12, after_step=look)
        optimizer.flush()
        found.append([*moved[DENSE - 3 :], float(optimizer.state[model[0].weight]["exp_avg_sq"].mean())])
    return found
