"""Compression.auto on real ranks: stock Horovod to the bit, switches that lose nothing, one choice for all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from dgc_horovod.planning.trial import COMPRESSED, DENSE, MOST_TIMED, SETTLING, TIMED
from dgc_horovod.state.residual_state import EARLIER_FP16
from dgc_horovod.testing.torch import session, take
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, save_checkpoint
from tests.helpers.auto_modes import made, stock, train_clipped
from tests.helpers.errors import error_of, error_told, stay_away
from tests.helpers.interrupted import STEPS, adamw, nesterov
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, smooth_model, train, weights

OPTIMIZERS = {"SGD": nesterov, "AdamW": adamw}


def channels_last() -> list[Any]:
    """A model of another memory format through every exchange: its distance from the usual one, and its weights."""
    hvd.init()
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 10)
        model = nn.Sequential(*layers).to(memory_format=layout)
        compression = Compression.auto(density=1.0, min_numel=16, values="fp32")
        optimizer = DistributedOptimizer(nesterov(model), model.named_parameters(), compression)
        torch.manual_seed(hvd.rank())
        for mode in (DENSE, COMPRESSED, DENSE):
            take(optimizer, mode)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 3, 8, 8).to(memory_format=layout)).square().mean().backward()
                optimizer.step()
        ends.append(weights(model))
    return [distance(*ends), fingerprint(model), model[0].weight.is_contiguous(memory_format=torch.channels_last)]


def dense_steps() -> dict[str, bool]:
    """Before a choice every bit is stock Horovod's."""
    found = {}
    for name, make in OPTIMIZERS.items():
        model, optimizer = made(make)
        train(model, optimizer, STEPS)
        found[name] = fingerprint(model) == fingerprint(stock(make))
    model, optimizer = made(clip_norm=0.5)
    train(model, optimizer, STEPS)
    found["clip_norm"] = fingerprint(model) == fingerprint(stock(nesterov, clip=0.5))
    return found


def script_clipping() -> dict[str, Any]:
    """A script's own clipping is stock's in dense steps, and local afterwards."""
    model, optimizer = made()
    train_clipped(model, optimizer, 0.5, batches(STEPS, hvd.rank()))
    same = fingerprint(model) == fingerprint(stock(nesterov, clip=0.5))
    before = _norm_of([state["momentum_buffer"] for state in optimizer.state.values()])
    take(optimizer, COMPRESSED)
    first, *others = batches(4, hvd.rank(), seed=2)
    train_clipped(model, optimizer, 0.5, [first], scale=30)  # far beyond the limit
    kept = optimizer.residual_state_dict()["tensors"].values()
    momentum = _norm_of([arrays["u"] for arrays in kept if "u" in arrays]) / before
    train_clipped(model, optimizer, 0.5, others, scale=30)
    told = "clipping" in session(optimizer).told or hvd.rank() > 0
    return {"same": same, "told": told, "weights": fingerprint(model), "momentum": momentum}


def _norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([x.flatten() for x in tensors]).norm())


_ORDER = (DENSE, COMPRESSED, DENSE, COMPRESSED, COMPRESSED, DENSE)


def switching() -> dict[str, Any]:
    """At density 1, unrounded, every switch leaves stock's training as it is; at 5% replicas stay replicas."""
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        model, optimizer = made(make, density=1.0, factor_masking=False, **UNROUNDED)
        _train_with(model, optimizer, list(_ORDER) if name == "SGD" else [DENSE])
        found[name] = distance(weights(stock(make)), weights(model))
        model, optimizer = made(make)
        found[f"{name}, replicas"] = _train_with(model, optimizer, list(_ORDER))
        found[f"{name}, left"] = sum(
            float(abs(x).sum())
            for arrays in optimizer.residual_state_dict()["tensors"].values()
            for x in arrays.values()
        )
    return found


def _train_with(model: nn.Module, optimizer: Any, modes: list[str]) -> list[str]:
    """`STEPS` steps, a mode after the other; fingerprints after each."""
    seen = []

    def switch(step: int) -> None:
        seen.append(fingerprint(model))
        if (step + 1) % (STEPS // len(modes)) == 0 and step + 1 < STEPS:
            take(optimizer, modes[(step + 1) // (STEPS // len(modes))])

    take(optimizer, modes[0])
    train(model, optimizer, STEPS, after_step=switch)
    return seen


def conservation() -> dict[str, float]:
    """Gradients that do not depend on the weights: whatever the order of exchanges, all of them arrive in the end."""
    hvd.init()
    found = {}
    for momentum in (0.0, 0.9):

        def sgd(model: nn.Module, momentum: float = momentum) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)

        ends = []
        for modes in ([DENSE], [COMPRESSED, DENSE, COMPRESSED, DENSE]):
            model, optimizer = made(sgd, factor_masking=False, **UNROUNDED)
            generator = torch.Generator().manual_seed(hvd.rank())
            for step in range(STEPS):
                take(optimizer, modes[step * len(modes) // STEPS])
                optimizer.zero_grad()
                sum((p * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters()).backward()
                optimizer.step()
            ends.append(weights(model) - weights(smooth_model()))
        found[str(momentum)] = distance(*ends)
    return found


def choosing() -> dict[str, Any]:
    """A choice by the clock: the same on every rank, and the one that the times say."""
    model, optimizer = made(mode=None, density=0.01)
    trial, modes, prints = session(optimizer).strategy.choice.trial, [], []
    most = 3 * (SETTLING + MOST_TIMED) + 1
    data = iter(batches(most, hvd.rank()))
    for _ in range(most):
        optimizer.zero_grad()
        x, y = next(data)
        nn.functional.mse_loss(model(x), y).backward()
        modes.append(trial.mode)
        optimizer.step()
        prints.append(fingerprint(model))
    return {
        "modes": modes, "prints": prints, "ended": trial.ended, "seconds": trial.seconds,
        "steps": session(optimizer).exchange.steps, "stats": optimizer.compression_stats()["steps"],
    }  # fmt: skip


def resuming() -> dict[str, Any]:
    """Saved and loaded in each state: the rest of the run is the uninterrupted one, bit for bit."""
    hvd.init()
    folder = hvd.broadcast_object(tempfile.mkdtemp(), name="folder")
    found: dict[str, Any] = {}
    for name, make in OPTIMIZERS.items():
        for mode in (DENSE, EARLIER_FP16, COMPRESSED):
            ends = []
            for stops in (False, True):
                model, optimizer = made(make)
                data = list(batches(STEPS, hvd.rank()))
                for step, (x, y) in enumerate(data):
                    if step == STEPS // 3:
                        take(optimizer, DENSE if mode == EARLIER_FP16 else mode)
                    if stops and step == 2 * STEPS // 3:
                        path = Path(folder) / f"{name}.{mode}"
                        if mode == EARLIER_FP16:  # what earlier versions wrote where fp16 was chosen
                            session(optimizer).strategy.choice.trial.mode = mode
                        save_checkpoint(path, model, optimizer)
                        model, optimizer = made(make, mode=None)
                        load_checkpoint(path, model, optimizer)
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
                ends.append(fingerprint(model))
            found[f"{name}, {mode}"] = [ends[0] == ends[1], session(optimizer).strategy.choice.trial.mode, ends[1]]
    return found


def uneven() -> dict[str, Any]:
    """Ranks that run out of data, undecided and compressed."""
    hvd.init()
    found: dict[str, Any] = {}
    for mode in (None, COMPRESSED):
        model, optimizer = made(mode=mode)
        more = 2 * TIMED if mode is None else 6  # the other rank comes to its comparison alone
        for x, y in batches(TIMED // 2 + more * hvd.rank(), hvd.rank()):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        hvd.join()
        trial = session(optimizer).strategy.choice.trial
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
        found[str(mode)] = [trial.ended, trial.mode]
        found[f"{mode}, steps"] = session(optimizer).exchange.steps  # a checkpoint is of one step
        train(model, optimizer, 4)
        found[f"{mode}, weights"] = fingerprint(model)
    return found


def given_up() -> dict[str, Any]:
    """Join in the middle of a trial: stock Horovod's exchange stays."""
    model, optimizer = made(mode=None)
    take(optimizer, COMPRESSED, on_trial=True)
    train(model, optimizer, 3 + 2 * hvd.rank())
    hvd.join()
    trial = session(optimizer).strategy.choice.trial
    found: dict[str, Any] = {"join": [trial.mode, trial.ended]}
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    train(model, optimizer, 4)
    return {**found, "weights": fingerprint(model)}


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(x))


def beside() -> dict[str, Any]:
    """What compression cannot do, and a job that may have stock Horovod need not stop for."""
    hvd.init()
    torch.manual_seed(0)
    model = _Embedded()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(sgd, model.named_parameters(), compression=Compression.auto(min_numel=16))
    for step in range(SETTLING + MOST_TIMED):
        optimizer.zero_grad()
        model(torch.tensor([step % 50, hvd.rank()])).square().sum().backward()
        optimizer.step()
    trial = session(optimizer).strategy.choice.trial
    damped = smooth_model()
    made_of = torch.optim.SGD(damped.parameters(), lr=0.05, momentum=0.9, dampening=0.1)
    stock_one = DistributedOptimizer(made_of, damped.named_parameters(), compression=Compression.auto())
    train(damped, stock_one, 3)
    model, optimizer = made(mode=COMPRESSED)
    train(model, optimizer, 2)
    take(optimizer, DENSE)
    return {
        "sparse": [trial.mode, trial.ended, trial.seconds == {}],
        "dampening": [hasattr(stock_one, "compression_stats"), fingerprint(damped)],
        "gradients": all(p.grad is not None for p in model.parameters()),
    }


def loading() -> dict[str, Any]:
    """What a job goes on with that has lost residuals, or was saved in the middle of a trial."""
    hvd.init()
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), name="folder"))
    found: dict[str, Any] = {}
    for mode in (DENSE, COMPRESSED):
        model, optimizer = made(mode=mode)
        train(model, optimizer, 3)
        save_checkpoint(folder / mode, model, optimizer)
        hvd.allreduce(torch.zeros(1), name="saved")
        if hvd.rank() == 0:
            next((folder / mode).glob("*rank1.npz")).write_bytes(b"")
        hvd.allreduce(torch.zeros(1), name="damaged")
        for residuals in ("ignored", "if sound"):
            model, optimizer = made(mode=None)
            load_checkpoint(folder / mode, model, optimizer, residuals=residuals)
            trial = session(optimizer).strategy.choice.trial
            found[f"{mode}, {residuals}"] = [trial.mode, trial.ended]
            train(model, optimizer, 2)
            found[f"{mode}, {residuals}, weights"] = fingerprint(model)
    model, optimizer = made(mode=None)
    take(optimizer, COMPRESSED, on_trial=True)
    train(model, optimizer, 3)
    save_checkpoint(folder / "trial", model, optimizer)
    found["saving"] = [session(optimizer).strategy.choice.trial.mode, session(optimizer).strategy.choice.trial.ended]
    model, optimizer = made(mode=None)
    load_checkpoint(folder / "trial", model, optimizer)
    found["trial"] = [session(optimizer).strategy.choice.trial.mode, session(optimizer).strategy.choice.trial.ended]
    return found


def on_nodes() -> dict[str, Any]:
    """Workers of a node keep slices: switches are the same for all of them, and lose nothing."""
    from dgc_horovod.torch import node_process_sets

    hvd.init(process_sets=node_process_sets(2))
    model, optimizer = made(exchange="hierarchical", node_size=2)
    found: dict[str, Any] = {"replicas": _train_with(model, optimizer, list(_ORDER))}
    record = optimizer.residual_state_dict()["tensors"].values()
    found["left"] = sum(float(abs(x).sum()) for arrays in record for x in arrays.values())
    return found


def missing() -> dict[str, Any]:
    """A rank that stays away from a dense step: the others say so within the time limit."""
    hvd.init()
    model, optimizer = made()
    train(model, optimizer, 2)
    if hvd.rank() == 0:
        return {"error": error_told(lambda: train(model, optimizer, 1), Path(os.environ["DGC_TEST_FOLDER"]))}
    stay_away(Path(os.environ["DGC_TEST_FOLDER"]))
    return {"error": ""}


def refused() -> dict[str, str]:
    """What auto is not for."""
    hvd.init()
    words = {}
    with contextlib.suppress(KeyError):
        words["rule"] = error_of(lambda: Compression.auto(rule="threshold", threshold=0.1))
    words["local"] = error_of(lambda: Compression.auto(local_steps=4, momentum_correction=False))
    words["total"] = error_of(lambda: Compression.dgc(total_steps=100))
    return words
