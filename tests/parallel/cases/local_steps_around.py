"""What scripts do around local steps, on real ranks: load, broadcast, freeze, thaw, wrap twice, change weights."""

from __future__ import annotations

import copy
import os
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.training import distance, smooth_model, train, weights
from tests.parallel.cases.local_steps import H, wrapped


def _spread(model: torch.nn.Module) -> float:
    """How far the ranks' weights are apart, at most."""
    every = hvd.allgather(weights(model)[None], name="spread")
    return float((every - every[:1]).abs().max())


def loading() -> dict[str, Any]:
    """States loaded and broadcast in the middle of a round, and between two; with outer momentum too."""
    hvd.init()
    found = {}
    model = smooth_model()
    optimizer = wrapped(model, check_every=1)
    train(model, optimizer, 2 * H + 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2 * H - 2)
    found["in a round"] = _spread(model)
    saved, kept = None, copy.deepcopy(model.state_dict())
    outer = {"outer_momentum": 0.9, "outer_rate": 0.7, "check_every": 1}
    other = smooth_model()
    optimizer = wrapped(other, **outer)
    train(other, optimizer, 2 * H)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = smooth_model(1)
    optimizer = wrapped(resumed, **outer)
    if hvd.rank() == 0:
        resumed.load_state_dict(kept)
        optimizer.load_state_dict(saved)
    hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(resumed, optimizer, 2 * H + 2)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(resumed, optimizer, H - 2)
    found["broadcast"] = _spread(resumed)
    alien = {**saved, "outer_momentum": {"nobody": torch.zeros(3)}}
    return {**found, "alien": error_of(lambda: optimizer.load_state_dict(alien))}


def freezing() -> dict[str, Any]:
    """A layer that is frozen during the training stays; one that is thawed is refused."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, 10 * H)
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    train(model, optimizer, 12 * H)  # until the outer momentum is over
    before = model[0].weight.detach().clone()
    train(model, optimizer, 10 * H)
    moved = float((model[0].weight - before).norm() / before.norm())
    late = smooth_model()
    late[0].weight.requires_grad_(False)
    optimizer = wrapped(late)
    train(late, optimizer, H)
    late[0].weight.requires_grad_(True)
    return {"moved": moved, "thawed": error_of(lambda: train(late, optimizer, H))}


def differing() -> dict[str, Any]:
    """Weights that differ on one rank are found, with their names, and repaired where that is asked for."""
    hvd.init()
    found: dict[str, Any] = {}
    for action in ("stop", "broadcast"):
        model = smooth_model()
        optimizer = wrapped(model, on_mismatch=action, check_every=1, outer_momentum=0.5)
        train(model, optimizer, H)
        outer = session(optimizer).strategy.rounds.outer(model[2].weight)
        with torch.no_grad():
            model[2].weight[0, 0] += 0.01 * hvd.rank()
            outer[0, 0] += 0.01 * hvd.rank()
        found[action] = error_of(lambda model=model, optimizer=optimizer: train(model, optimizer, H))
        if action == "broadcast":
            every = hvd.allgather(outer[None], name="outer")
            found["repaired"] = [_spread(model), float((every - every[:1]).abs().max())]
    return found


def offloaded() -> dict[str, Any]:
    """What is kept lies in host memory: on a CPU not a bit changes, though every change is compressed beside p.grad."""
    hvd.init()
    ends = []
    for offload in (False, True):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
        torch.manual_seed(0)
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
        optimizer = wrapped(model, outer_momentum=0.5, outer_rate=0.7, check_every=1, offload=offload)
        model = model.to(memory_format=torch.channels_last)
        for step in range(4 * H + 2):
            optimizer.zero_grad()
            x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
            (model(x) - x.mean((1, 2, 3))[:, None]).square().mean().backward()
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        optimizer.exchange()
        kept = optimizer.residual_state_dict()["tensors"]
        outer = optimizer.state_dict()["outer_momentum"].values()
        optimizer.flush()
        every = [x for arrays in kept.values() for x in arrays.values()]
        ends.append([weights(model), torch.cat([x.flatten() for x in [*every, *outer]])])
    return {"same": [torch.equal(a, b) for a, b in zip(*ends, strict=True)], "kept": bool(ends[1][1].any())}


def overflowing() -> dict[str, Any]:
    """One rank's gradient is beyond float32 when Adam squares it, and another not finite: the next steps are small."""
    hvd.init()
    model = torch.nn.Linear(40, 50)
    for p in model.parameters():
        torch.nn.init.ones_(p)
    optimizer = wrapped(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    for step in range(3 * H):
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
        if hvd.rank() == 1 and step // H == 1:
            model.weight.grad[0, 0] = 1e25
        optimizer.step()
        if hvd.rank() == 1 and step == H + 1:
            model.bias.data[0] = float("nan")
    return {"apart": _spread(model), "largest": float(model.weight.detach().abs().max())}


def counting() -> dict[str, Any]:
    """Rounds that the script ends early count as they are; an optimizer whose model was wrapped again is refused."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    for _ in range(10):
        train(model, optimizer, 1)
        optimizer.exchange()
    optimizer.exchange()
    dense = 10 * 4 * sum(p.numel() for p in model.parameters())
    stats = optimizer.compression_stats()
    wrapped(model)
    wrapped(model)
    return {
        "dense": stats["bytes_dense"] / dense, "superseded": error_of(lambda: train(model, optimizer, 1)),
        "steps": error_of(lambda: Compression.local(steps=None)),
    }  # fmt: skip


def spoiled_gradient() -> dict[str, Any]:
    """One gradient of one rank is not finite: that rank leaves one step out, and its running statistics stay sound."""
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))
    optimizer = wrapped(model)
    before = weights(model)
    for step in range(2 * H):
        optimizer.zero_grad()
        model(torch.randn(16, 20)).square().mean().backward()
        if hvd.rank() == 1 and step == H + 2:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
    counts = session(optimizer).exchange.counts
    found = {
        "spread": _spread(model), "statistics": bool(torch.isfinite(model[1].running_var).all()),
        "skipped": counts.skipped, "moved": not torch.equal(before, weights(model)), "left out": counts.left_out,
    }  # fmt: skip
    model = smooth_model()
    optimizer = wrapped(model, max_skipped=2)

    def spoil(_: int) -> None:
        if hvd.rank() == 1:
            model[0].weight.data[0, 0] = float("nan")

    return {**found, "for long": error_of(lambda: train(model, optimizer, 9 * H, after_step=spoil))}


def set_within() -> dict[str, float]:
    """Weights that a script goes back to in the middle of a round: said once, and three ways to do it."""
    hvd.init()
    found = {}
    for name in ("plain", "broadcast", "cleared"):
        model = smooth_model()
        optimizer = wrapped(model, density=1.0, values="fp32", dense_values="fp32", outer_momentum=0.5)
        best = {key: x.clone() for key, x in model.state_dict().items()}
        train(model, optimizer, 3 * H + 2)
        with messages() as said:
            model.load_state_dict(best)
            if name == "broadcast":
                hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            if name == "cleared":
                optimizer.clear_residuals()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            train(model, optimizer, 4 * H)
        target = torch.cat([x.flatten() for x in best.values()])
        found[name] = distance(target, weights(model))
        found[f"{name}: said"] = sum("within a round" in text for text in said)
    return found


def handed_over() -> dict[str, Any]:
    """A second optimizer for the model, made in the middle of a round of the first: the ranks begin alike."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, check_every=1)
    train(model, optimizer, 2 * H + 2)
    compression = Compression.local(steps=H, min_numel=64, check_every=1)
    named = list(model.named_parameters())
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), named, compression=compression)
    begun = _spread(model)
    train(model, optimizer, 2 * H)
    found = {"begun": begun, "ended": _spread(model)}
    train(model, optimizer, 2)
    hvd.broadcast_parameters(list(model.parameters()), 0)
    kept = optimizer if hvd.rank() == 0 else None
    del optimizer
    again = torch.optim.SGD(model.parameters(), 0.01)
    found["kept by one rank"] = error_of(lambda: DistributedOptimizer(again, named, compression=compression))
    del kept
    return found


def counted_anew() -> dict[str, Any]:
    """A run with packets at every step goes on with local steps: their warm-up counts exchanges, from none."""
    hvd.init()
    folder = os.path.join(os.environ["DGC_TEST_FOLDER"], "per-step")
    model = smooth_model()
    named = list(model.named_parameters())
    inner = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    optimizer = DistributedOptimizer(inner, named, compression=Compression.dgc(density=0.1, min_numel=64))
    train(model, optimizer, 30)
    save_checkpoint(folder, model, optimizer)
    other = smooth_model(1)
    made = wrapped(other, torch.optim.SGD(other.parameters(), 0.01, momentum=0.9), warmup=WarmupSchedule(steps=20))
    load_checkpoint(folder, other, made, residuals="ignored")
    train(other, made, H)
    step = session(made).exchange.steps
    return {"exchanges": made.compression_stats()["steps"], "step": step, "spread": _spread(other)}
