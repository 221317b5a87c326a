"""What is known of AdamW's second moment where a state is saved, loaded, flushed and handed on."""

from __future__ import annotations

import os
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import load_checkpoint, save_checkpoint
from dgc_horovod.torch.elastic import TorchState
from tests.helpers.errors import error_of
from tests.helpers.training import distance, fingerprint, smooth_model, train, weights
from tests.parallel.cases.adam import DENSE, adamw, known, wrapped


def state() -> dict[str, Any]:
    """Interrupted in the dense steps and after them; then flushed: stock's state is complete again."""
    hvd.init()
    found: dict[str, Any] = {}
    for name, at, dense in (("dense", DENSE // 2, DENSE), ("compressed", DENSE + 5, DENSE), ("from the first", 13, 0)):
        runs = []
        for interrupted in (False, True):
            model = smooth_model()
            optimizer = wrapped(model, dense)
            train(model, optimizer, at)
            if interrupted:
                kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
                other = smooth_model(1)
                other.load_state_dict(model.state_dict())
                model, optimizer = other, wrapped(other, dense)
                optimizer.load_state_dict(saved)
                optimizer.load_residual_state_dict(kept)
            train(model, optimizer, 2 * DENSE)
            runs.append([fingerprint(model), known(optimizer)])
        found[name] = runs
    before = {name: values[[1, 2]].tolist() for name, values in session(optimizer).exchange.second.saved().items()}
    square = torch.from_numpy(session(optimizer).exchange.second["0.weight"].square())
    optimizer.flush()
    stock = smooth_model()
    stock.load_state_dict(model.state_dict())
    plain = adamw(stock)
    plain.load_state_dict(optimizer.state_dict())
    theirs = plain.state[stock[0].weight]
    bias = 1 - 0.95 ** int(theirs["step"])
    found["stock"] = [int(theirs["step"]), distance(theirs["exp_avg_sq"].flatten() / bias, square)]
    train(model, optimizer, 1)
    after = {name: values[[1, 2]].tolist() for name, values in session(optimizer).exchange.second.saved().items()}
    return found | {"before": before, "after": after, "replica": fingerprint(model)}


def stock_checkpoint() -> dict[str, Any]:
    """Gone on with from stock Adam's state: its first moment, too, is applied in the end."""
    hvd.init()
    model = smooth_model()
    stock = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    other = smooth_model()
    other.load_state_dict(model.state_dict())
    optimizer = wrapped(other)
    optimizer.load_state_dict(stock.state_dict())
    p = other[0].weight
    pull = stock.state[model[0].weight]["exp_avg"] * (0.9 / 0.1)
    optimizer.zero_grad()
    (0.0 * other(torch.zeros(4, p.shape[1])).sum()).backward()
    start = p.detach().clone()
    optimizer.step()
    optimizer.flush()
    square = stock.state[model[0].weight]["exp_avg_sq"] / (1 - 0.95**DENSE)
    rows, columns = (square.mean(dim, keepdim=True).clamp(min=float(square.mean()) / 100) for dim in (1, 0))
    sought = start * (1 - 1e-5) - 1e-3 * pull / (rows * columns / square.mean()).sqrt()
    return {"moved": distance(sought, p.detach()) / distance(start, p.detach()), "replica": fingerprint(other)}


def looked_at() -> dict[str, str]:
    """A state that one rank alone asks for changes nothing."""
    hvd.init()
    found = {}
    for name, asks in (("not", ()), ("asked", (DENSE - 2, DENSE + 2, DENSE + 5))):
        model = smooth_model()
        optimizer = wrapped(model, DENSE)

        def ask(step: int, optimizer: Any = optimizer, asks: tuple[int, ...] = asks) -> None:
            if hvd.rank() == 0 and step in asks:
                optimizer.state_dict()

        train(model, optimizer, 2 * DENSE, after_step=ask)
        found[name] = fingerprint(model)
    return found


def earlier() -> str:
    """A record of moments that were each rank's own."""
    hvd.init()
    optimizer = wrapped(smooth_model())
    kept = optimizer.residual_state_dict()
    v = kept["tensors"]["0.weight"]["v"]
    kept["tensors"]["0.weight"].update(first=torch.zeros_like(v), second=torch.zeros_like(v))
    return error_of(lambda: optimizer.load_residual_state_dict(kept))


def saved() -> dict[str, Any]:
    """Saved for another number of ranks."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, DENSE)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    return {"replica": fingerprint(model), "known": known(optimizer)}


def loaded() -> dict[str, Any]:
    """Gone on with by another number of ranks."""
    hvd.init()
    model = smooth_model(1)
    optimizer = wrapped(model)
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    before, same = fingerprint(model), known(optimizer)
    losses = train(model, optimizer, 30)
    return {"before": before, "known": same, "replica": fingerprint(model), "losses": losses}


def handed_on() -> dict[str, Any]:
    """A record that was loaded and is saved again; elastic's state; then a join, and a checkpoint after it."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model)
    train(model, optimizer, DENSE)
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
    if hvd.rank() == 1:  # as a newcomer knows nothing
        session(optimizer).exchange.second.clear()
    state.sync()
    found["synced"] = known(optimizer)
    train(model, optimizer, 3 + hvd.rank())
    hvd.join()
    found["joined"] = known(optimizer)
    save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
    other = smooth_model(1)
    resumed = wrapped(other)
    load_checkpoint(os.environ["DGC_TEST_FOLDER"], other, resumed)
    found["loaded"] = fingerprint(other) == fingerprint(model)
    losses = train(other, resumed, 30)
    return found | {"replica": fingerprint(other), "known": known(resumed), "losses": losses}


def broadcast() -> dict[str, Any]:
    """Replicas that differ go on with the weights and the second moments of the first."""
    hvd.init()
    model = smooth_model()
    optimizer = wrapped(model, check_every=4, on_mismatch="broadcast")
    train(model, optimizer, 10)
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].weight.add_(0.1)
        session(optimizer).exchange.second.rescale(2.0)
    train(model, optimizer, 20)
    return {"replica": fingerprint(model), "known": known(optimizer), "size": float(weights(model).norm())}
