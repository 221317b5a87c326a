"""Loading, freezing, looking, giving up, editing: what scripts do around a step works as with stock, or is told of."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod.torch import broadcast_optimizer_state, broadcast_parameters

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, WarmupSchedule
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import UNROUNDED, adamw, batches, distance, fingerprint, sgd, step, weights
from tests.helpers.run import everything
from tests.helpers.training import first_loss, made, momentum_sgd, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.02)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": partial(sgd, lr=0.02),
    "sgd with decay": partial(sgd, lr=0.02, weight_decay=1e-3),
    "adamw": adamw,
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def _kept(optimizer: Any) -> float:
    """The largest element of u and v on this rank."""
    arrays = session(optimizer).exchange.state_arrays()
    return max(float(abs(part).max()) for parts in arrays.values() for part in parts.values())


@each_optimizer
def test_a_state_that_one_rank_has_loaded_can_be_broadcast(name):
    """In the middle of a run rank 0 alone loads a state, then all broadcast: Horovod's own idiom."""
    model, optimizer = made(FEW, OPTIMIZERS[name])
    train(model, optimizer, 5)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 7)
    assert _kept(optimizer) > 0
    if hvd.rank() == 0:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    broadcast_parameters(model.state_dict(), 0)
    broadcast_optimizer_state(optimizer, 0)
    assert _kept(optimizer) == 0, "u and v are of a run that was given up"
    train(model, optimizer, 5)
    same_on_ranks(fingerprint(model))


@each_optimizer
def test_looking_at_the_state_changes_nothing(name):
    """Asking for state_dict(), on one rank, and broadcasting what nobody has loaded, changes no bit.

    In dense steps, right before the first that are compressed, and after it.
    """
    ends, warmup = [], WarmupSchedule(steps=6, first_density=1.0, factor=1e-3)
    for looks in (False, True):
        model, optimizer = made(Compression.dgc(0.02, warmup=warmup), OPTIMIZERS[name])
        for _ in range(4):
            train(model, optimizer, 3)
            if looks and hvd.rank() == 1:
                optimizer.state_dict()
            if looks:
                broadcast_optimizer_state(optimizer, 0)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]


def test_gradients_of_a_fresh_optimizer_are_zeros_after_a_broadcast():
    """As with stock Horovod, and weights are what they were; zero_grad() takes torch's argument."""
    model, optimizer = made(FEW, OPTIMIZERS["sgd with decay"])
    before = fingerprint(model)
    broadcast_optimizer_state(optimizer, 0)
    assert fingerprint(model) == before and isinstance(optimizer, torch.optim.SGD)
    for to_none in (False, True):
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        optimizer.zero_grad(set_to_none=to_none)
    assert all(p.grad is None for p in model.parameters())


@each_optimizer
def test_a_frozen_layer_comes_to_rest_as_with_stock_horovod(name):
    """A layer is frozen after 20 steps, and thawed after 100 more."""
    moves = {}
    for way in ("stock", "ours"):
        compression = None if way == "stock" else Compression.dgc(0.005, compress_1d=True)
        model, optimizer = made(compression, OPTIMIZERS[name])
        train(model, optimizer, 20)
        layer = model[2]
        at = [layer.weight.detach().clone()]
        for frozen, steps in ((True, 70), (True, 30), (False, 20)):
            layer.requires_grad_(not frozen)
            train(model, optimizer, steps)
            at.append(layer.weight.detach().clone())
        moves[way] = [float((b - a).norm() / a.norm()) for a, b in itertools.pairwise(at)]
    first, later, again = moves["ours"]
    assert first <= 2.5 * moves["stock"][0] + 1e-3
    assert later <= 1.1 * moves["stock"][1] + 1e-6  # weight decay goes on
    assert again > later + 1e-5
    same_on_ranks(fingerprint(model))


def test_gradients_can_be_read_before_they_are_exchanged():
    """Between backward and synchronize p.grad is this rank's gradient."""
    model, optimizer = made(FEW)
    for x, y in batches(5, hvd.rank()):
        own = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), own, strict=True))
        optimizer.step()
    same_on_ranks(fingerprint(model))


def _raise(_: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError


def test_a_step_can_be_given_up():
    """An exception between backward and step, or in the middle of backward, is caught by the script on every rank."""
    model, optimizer = made(FEW)
    train(model, optimizer, 3)
    for within in (False, True):
        optimizer.zero_grad()
        hook = model[2].weight.register_hook(_raise if within else lambda grad: grad)
        with pytest.raises(ArithmeticError):
            first_loss(model).backward()
            _raise(torch.zeros(1))
        hook.remove()
        with pytest.raises(UnsupportedUse, match=r"optimizer\.synchronize\(\)"):
            optimizer.zero_grad()
        optimizer.synchronize()
        optimizer.zero_grad()
    before = weights(model)
    train(model, optimizer, 5)
    assert not torch.equal(before, weights(model))
    same_on_ranks(fingerprint(model))


def test_a_second_synchronization_changes_nothing_and_is_warned_of():
    """By another synchronize(), or of a script that lets step() synchronize again."""
    ends = []
    for times in range(3):
        model, optimizer = made(FEW)
        for x, y in batches(10, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(times):
                    optimizer.synchronize()
                optimizer.step()
            assert len(seen) == min(times, 1)
            assert all("without optimizer.skip_synchronize() context" in str(each.message) for each in seen)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1] == ends[2]


def test_methods_of_the_script_on_the_object_that_is_wrapped():
    """They are of that object alone, as in stock: one around zero_grad() had cleared gradients behind our back."""
    ends, calls = [], []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = momentum_sgd(model)
        for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
            setattr(optimizer, name, lambda *_, name=name: calls.append(name))
        return optimizer

    for compression in (None, everything()):
        model, optimizer = made(compression, make)
        train(model, optimizer, 3)
        optimizer.load_state_dict(optimizer.state_dict())
        ends.append(weights(model))
    assert calls == [] and float((ends[0] - ends[1]).abs().max()) < 1e-5


class Adjusted(torch.optim.SGD):
    """An optimizer with another method, which applies no update."""

    def adjust(self) -> None:
        """Halve the learning rate."""
        for group in self.param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize("clears", [False, True])
def test_weights_that_the_script_has_written_to_are_told_from_another_step(clears):
    """The optimizer alone was blamed, whose other methods had not been called.

    The script drops an update and goes back to weights from before: without and with zero_grad() between the two.
    """
    model, optimizer = made(FEW, lambda model: Adjusted(model.parameters(), 0.02))

    def drop() -> None:
        before = copy.deepcopy(model.state_dict())
        train(model, optimizer, 2)
        first_loss(model).backward()
        optimizer.synchronize()
        if clears:
            optimizer.zero_grad()
        model.load_state_dict(before)
        train(model, optimizer, 2)

    error = error_of(drop)
    if clears:
        assert error == ""
    else:
        assert "(its other methods: adjust()), or the script has written to all weights" in error
        assert "must call optimizer.zero_grad() between the two" in error
    same_on_ranks(error, fingerprint(model))


COMPRESSIONS = {
    "momentum": everything(min_numel=16),
    "feedback": Compression.topk(1.0, min_numel=16, **UNROUNDED),
    "sparse": Compression.dgc(0.1, min_numel=16),
}


def _wrapped(way: str, make: Callable[[nn.Module], torch.optim.Optimizer] = momentum_sgd) -> tuple[Any, Any]:
    return made(None if way == "stock" else COMPRESSIONS[way], make)


def _told(optimizer: Any) -> list[str]:
    """On rank 0."""
    return sorted(session(optimizer).told)


def _on_rank_0(*keys: str) -> list[str]:
    return list(keys) if hvd.rank() == 0 else []


def test_gradients_that_a_script_takes_away_do_not_come_later():
    """Twelve steps of them came in a burst."""
    moves: dict[str, list[float]] = {}
    for way in ("stock", "sparse"):
        model, optimizer = _wrapped(way)
        layer, moves[way] = model[2], []
        for i, (x, y) in enumerate(batches(16, hvd.rank())):
            before = layer.weight.detach().clone()
            step(model, optimizer, x, y, between=lambda: setattr(layer.weight, "grad", None) if i < 12 else None)  # noqa: B023
            moves[way].append(float((layer.weight.detach() - before).norm()))
    assert _told(optimizer) == _on_rank_0("taken away")
    assert max(moves["sparse"][:12]) == 0 and 0 < max(moves["sparse"][12:]) < 3 * max(moves["stock"][12:])
    same_on_ranks(fingerprint(model))


def _leaves_updates(way: str, what: str) -> tuple[str, torch.Tensor, Any]:
    """The error of three steps before which `what` is done to an update that none has applied; weights; optimizer."""
    model, optimizer = _wrapped(way)

    def train() -> None:
        for x, y in batches(3, hvd.rank()):
            optimizer.synchronize()  # the first time with gradients of zeros
            optimizer.zero_grad()
            if what != "none":
                F.mse_loss(model(x), -y).backward()
                optimizer.synchronize()
            if what.startswith("dropped"):
                (model if "model" in what else optimizer).zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return error_of(train), weights(model), optimizer


@pytest.mark.parametrize("what", ["none", "added to", "dropped", "dropped by the model"])
def test_an_update_that_was_not_applied_does_not_enter_a_momentum_again(what):
    """It did so without a word, 1.7 times as much at each step; nor was told what the model's zero_grad drops."""
    error, stock, _ = _leaves_updates("stock", what)
    assert error == ""
    for way in ("feedback", "momentum"):
        error, end, optimizer = _leaves_updates(way, what)
        assert _told(optimizer) == (_on_rank_0("dropped") if what.startswith("dropped") else []), way
        if (what, way) == ("added to", "momentum"):
            assert error.startswith("UnsupportedUse: backward() was called between synchronize() and step()")
            continue
        assert error == "", way
        if what.startswith("dropped") and way == "momentum":
            assert distance(end, stock) > 1e-3  # of which rank 0 is told
        else:
            assert distance(end, stock) < 1e-5, way


def _in_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "momentum": 0.0}, {"params": others, "momentum": 0.9, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05)


def _reverse(optimizer: Any) -> None:
    optimizer.param_groups.reverse()


def _merge(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"] += first["params"]
    optimizer.param_groups[:] = [second]


def _leave_out(optimizer: Any) -> None:
    left = optimizer.param_groups[1]["params"]
    left[-1].requires_grad_(False)  # a frozen one, as scripts do
    optimizer.param_groups[1]["params"] = left[:-2]


@pytest.mark.parametrize("change", [_reverse, _merge, _leave_out])
def test_parameter_groups_may_change_between_steps(change):
    """They change their order, or one takes in the other."""
    ends = []
    for way in ("stock", "momentum"):
        model, optimizer = _wrapped(way, _in_two_groups)
        for i, (x, y) in enumerate(batches(6, hvd.rank())):
            if i == 2:
                change(optimizer)
            step(model, optimizer, x, y)
        ends.append(weights(model))
    assert float((ends[0] - ends[1]).abs().max()) < 1e-5


class _Own(torch.optim.SGD):
    """Methods with arguments and results of their own."""

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()

    def state_dict(self, light: bool = False) -> dict[str, Any]:  # type: ignore[override]
        return {**super().state_dict(), "light": light}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.strict = strict

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        super().step()
        return "done"


@pytest.mark.parametrize("way", ["stock", "momentum", "sparse"])
def test_methods_of_an_optimizer_keep_their_arguments_and_results(way):
    model, optimizer = _wrapped(way, lambda model: _Own(model.parameters(), lr=0.05, momentum=0.9))
    optimizer.zero_grad()
    first_loss(model).backward()
    assert optimizer.step() == "done"
    saved = optimizer.state_dict(light=True)
    optimizer.load_state_dict(saved, strict=False)
    assert saved["light"] is True and optimizer.strict is False
