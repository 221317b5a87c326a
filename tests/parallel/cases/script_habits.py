"""What scripts do around a step: it works as with stock Horovod, or is refused in words."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod.torch import broadcast_optimizer_state, broadcast_parameters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.training import UNROUNDED, batches, fingerprint, momentum_sgd, smooth_model, train, weights

FEW = Compression.dgc(0.02)
_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.02, 0.9),
    "sgd with decay": lambda model: torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}


def _wrapped(make: Callable[[nn.Module], torch.optim.Optimizer], **fields: Any) -> tuple[nn.Module, Any]:
    model = smooth_model()
    return model, DistributedOptimizer(make(model), model.named_parameters(), Compression.dgc(0.02, **fields))


def _kept(optimizer: Any) -> float:
    """The largest element of u and v on this rank."""
    arrays = session(optimizer).exchange.state_arrays()
    return max(float(abs(part).max()) for parts in arrays.values() for part in parts.values())


def loaded_on_one_rank() -> dict[str, Any]:
    """In the middle of a run rank 0 alone loads a state, then all broadcast: Horovod's own idiom."""
    hvd.init()
    results = {}
    for name, make in _OPTIMIZERS.items():
        model, optimizer = _wrapped(make)
        train(model, optimizer, 5)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, 7)
        before = _kept(optimizer)
        if hvd.rank() == 0:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        broadcast_parameters(model.state_dict(), 0)
        broadcast_optimizer_state(optimizer, 0)
        kept = before, _kept(optimizer)
        train(model, optimizer, 5)
        results[name] = {"fingerprint": fingerprint(model), "kept": kept}
    return results


def looked_at_state() -> dict[str, bool]:
    """Asking for state_dict() at every step, on one rank, and broadcasting what nobody has loaded, changes no bit."""
    hvd.init()
    results = {}
    for name, make in _OPTIMIZERS.items():
        prints = []
        for looks in (False, True):
            model, optimizer = _wrapped(make)
            for _ in range(4):
                train(model, optimizer, 3)
                if looks and hvd.rank() == 1:
                    optimizer.state_dict()
                if looks:
                    broadcast_optimizer_state(optimizer, 0)
            prints.append(fingerprint(model))
        results[name] = prints[0] == prints[1]
    return results


def fresh_gradients() -> bool:
    """Whether gradients are zeros after the state of a new optimizer was broadcast, as with stock Horovod."""
    hvd.init()
    model, optimizer = _wrapped(momentum_sgd)
    broadcast_optimizer_state(optimizer, 0)
    return all(p.grad is not None and not p.grad.any() for p in model.parameters())


def frozen_layers() -> dict[str, Any]:
    """How far a layer moves that was frozen after 20 steps, with stock Horovod and ours; and once it is no more."""
    hvd.init()
    results: dict[str, Any] = {}
    for name, make in _OPTIMIZERS.items():
        for way in ("stock", "ours"):
            model = smooth_model()
            factory = hvd.DistributedOptimizer if way == "stock" else DistributedOptimizer
            compression = hvd.Compression.none if way == "stock" else Compression.dgc(0.005, compress_1d=True)
            optimizer = factory(make(model), model.named_parameters(), compression)
            train(model, optimizer, 20)
            layer = model[2]  # type: ignore[index]
            at = [layer.weight.detach().clone()]
            layer.requires_grad_(False)
            for steps in (70, 30):
                train(model, optimizer, steps)
                at.append(layer.weight.detach().clone())
            layer.requires_grad_(True)
            train(model, optimizer, 20)
            at.append(layer.weight.detach().clone())
            moves = [float((b - a).norm() / a.norm()) for a, b in itertools.pairwise(at)]
            results[f"{name}, {way}"] = {"moves": moves, "fingerprint": fingerprint(model)}
    return results


def networks_in_turns() -> list[float]:
    """Largest residuals of a layer that is frozen in every second step: nothing of it is dropped."""
    hvd.init()
    kept = []
    for turns in (False, True):
        model, optimizer = _wrapped(momentum_sgd)
        for step in range(30):
            model[2].requires_grad_(not turns or step % 2 == 0)  # type: ignore[index]
            train(model, optimizer, 1)
        kept.append(float(abs(session(optimizer).exchange.state_arrays()["2.weight"]["v"]).max()))
    return kept


def readable_gradients() -> dict[str, Any]:
    """Between backward and synchronize p.grad is this rank's gradient."""
    hvd.init()
    model, optimizer = _wrapped(momentum_sgd)
    same = []
    for x, y in batches(5, hvd.rank()):
        own = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        same.append(all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True)))  # type: ignore[arg-type]
        optimizer.step()
    return {"same": all(same), "fingerprint": fingerprint(model)}


def given_up_steps() -> dict[str, Any]:
    """An exception between backward and step, or in the middle of backward, is caught by the script on every rank."""
    hvd.init()
    model, optimizer = _wrapped(momentum_sgd)
    train(model, optimizer, 3)
    refusals = []
    for x, y in batches(2, hvd.rank()):
        optimizer.zero_grad()
        hook = model[2].weight.register_hook(_raise) if refusals else None  # type: ignore[index]
        try:
            F.mse_loss(model(x), y).backward()
            _raise(x)
        except ArithmeticError:
            pass
        if hook is not None:
            hook.remove()
        try:
            optimizer.zero_grad()
        except UnsupportedUse as error:
            refusals.append(str(error))
        optimizer.synchronize()
        optimizer.zero_grad()
    before = weights(model)
    train(model, optimizer, 5)
    return {"refusals": refusals, "fingerprint": fingerprint(model), "moved": float((weights(model) - before).norm())}


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError


def copies() -> list[str]:
    """What a script is told that copies or pickles a wrapped optimizer."""
    hvd.init()
    _, optimizer = _wrapped(momentum_sgd)
    told = []
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        try:
            way(optimizer)
        except UnsupportedUse as error:
            told.append(str(error))
    return told


def synchronized_again() -> dict[str, Any]:
    """A GAN as Horovod's maintainers advise: each network's optimizer is synchronized before its gradients are cleared.

    Weights of the generator, beside those without these calls; what is told; and of a second ``step()``.
    """
    hvd.init()
    ends, told, errors = [], [], []
    for advised in (False, True):
        torch.manual_seed(1)
        generator, discriminator = nn.Linear(64, 64), nn.Linear(64, 64)
        compression, noise = Compression.dgc(0.02), torch.Generator().manual_seed(hvd.rank())
        g, d = (
            DistributedOptimizer(momentum_sgd(model), model.named_parameters(name), compression=compression)
            for name, model in (("g", generator), ("d", discriminator))
        )
        for _ in range(4):
            z = torch.randn(8, 64, generator=noise)
            d.zero_grad()
            discriminator(generator(z).detach()).pow(2).mean().backward()
            d.step()
            if advised:
                g.synchronize()
                g.synchronize()
            g.zero_grad()
            discriminator.requires_grad_(False)
            discriminator(generator(z)).pow(2).mean().backward()
            discriminator.requires_grad_(True)
            g.step()
            if advised:
                d.synchronize()
        ends.append(fingerprint(generator))
        told += [*session(g).told, *session(d).told]
        with g.skip_synchronize():
            g.synchronize()
            errors += [error_of(g.step)]
        errors += [error_of(g.step), error_of(d.step)]
        assert fingerprint(generator) == ends[-1]
    return {"ends": ends, "told": told, "errors": errors}


def filled_state() -> dict[str, Any]:
    """torch.distributed.checkpoint asks rank 0 alone, then all, for a state before the first step, and gives it back.

    For each optimizer: learning rate, whether weights stay, and weights trained with that and without.
    """
    hvd.init()
    found: dict[str, Any] = {}
    ways = {"dgc": Compression.dgc(0.02), "local": Compression.local(steps=2, density=0.02), "auto": Compression.auto()}
    for kind, way in itertools.product(("SGD", "RMSprop", "SGD, momentum"), ways):
        ends = []
        for asks in (False, True):
            model = smooth_model()
            momentum = {"momentum": 0.9} if "momentum" in kind else {}
            optimizer = getattr(torch.optim, kind.split(",")[0])(model.parameters(), lr=0.01, **momentum)
            optimizer = DistributedOptimizer(optimizer, model.named_parameters(), ways[way])
            before = fingerprint(model)
            if asks and hvd.rank() == 0:
                get_state_dict(model, optimizer)
            if asks:
                state = get_state_dict(model, optimizer)
                set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
            stays, rate = fingerprint(model) == before, optimizer.param_groups[0]["lr"]
            train(model, optimizer, 4)
            ends.append([fingerprint(model), optimizer.compression_stats()["steps"]])
        found[f"{kind}, {way}"] = {"rate": rate, "stays": stays, "ends": ends}
    return found


class _Around(torch.optim.SGD):
    """Another optimizer inside, which makes the step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.02)
        self.base = torch.optim.SGD(self.param_groups, lr=0.02)

    def step(self, closure: Any = None) -> None:
        """As that of the one inside."""
        self.base.step()


def wrapped_before() -> dict[str, Any]:
    """What stands on the object that is wrapped, or inside of it: methods of the script, and another optimizer."""
    hvd.init()
    ends, calls = [], []
    for factory, compression in (
        (hvd.DistributedOptimizer, hvd.Compression.none),
        (DistributedOptimizer, Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)),
    ):
        model = smooth_model()
        optimizer = momentum_sgd(model)
        for name in ("step", "zero_grad", "state_dict"):
            setattr(optimizer, name, lambda name=name: calls.append(name))
        optimizer = factory(optimizer, model.named_parameters(), compression=compression)
        train(model, optimizer, 3)
        optimizer.state_dict()
        ends.append(weights(model))
    model = smooth_model()
    optimizer = DistributedOptimizer(_Around(model), model.named_parameters(), Compression.dgc(0.02))
    train(model, optimizer, 3)
    optimizer.flush()
    return {
        "calls": calls,
        "distance": float((ends[0] - ends[1]).abs().max()),
        "inside": error_of(optimizer.base.step),
    }


class Adjusted(torch.optim.SGD):
    """An optimizer with another method, which applies no update."""

    def adjust(self) -> None:
        """Halve the learning rate."""
        for group in self.param_groups:
            group["lr"] /= 2


def written_weights() -> dict[str, str]:
    """The script drops an update and goes back to weights from before: without and with zero_grad() between the two."""
    hvd.init()
    found = {}
    for clears in (False, True):
        model, optimizer = _wrapped(lambda model: Adjusted(model.parameters(), 0.02))

        def drop(model: nn.Module = model, optimizer: Any = optimizer, clears: bool = clears) -> None:
            before = copy.deepcopy(model.state_dict())
            train(model, optimizer, 2)
            x, y = next(iter(batches(1, hvd.rank())))
            F.mse_loss(model(x), y).backward()
            optimizer.synchronize()
            if clears:
                optimizer.zero_grad()
            model.load_state_dict(before)
            train(model, optimizer, 2)

        found["cleared" if clears else "not cleared"] = error_of(drop) or fingerprint(model)
    return found


def patched_class() -> list[Any]:
    """How often a function around ``step`` on the class, as autologging puts it there, is called in three steps."""
    hvd.init()
    calls, ends, own = [], [], torch.optim.SGD.step

    @functools.wraps(own)
    def step(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return own(*args, **named)

    torch.optim.SGD.step = step  # type: ignore[method-assign]
    try:
        for factory, compression in ((hvd.DistributedOptimizer, hvd.Compression.none), (DistributedOptimizer, FEW)):
            model = smooth_model()
            train(model, factory(momentum_sgd(model), model.named_parameters(), compression=compression), 3)
            ends.append([len(calls), fingerprint(model)])
    finally:
        torch.optim.SGD.step = own  # type: ignore[method-assign]
    return ends


def synchronized_twice() -> list[str]:
    """The warnings of a script that lets step() synchronize again."""
    hvd.init()
    model, optimizer = _wrapped(momentum_sgd)
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.synchronize()
        optimizer.step()
    return [str(warning.message) for warning in seen]
