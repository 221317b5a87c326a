"""Loading, freezing, looking, giving up: what scripts do around a step works as with stock, or is refused in words."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from horovod.torch import broadcast_optimizer_state, broadcast_parameters

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.interrupted import made
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import UNROUNDED, batches, fingerprint, momentum_sgd, smooth_model, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.02)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.02, 0.9),
    "sgd with decay": lambda model: torch.optim.SGD(model.parameters(), 0.02, 0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def _loss(model: Any) -> torch.Tensor:
    x, y = next(iter(batches(1, hvd.rank())))
    return F.mse_loss(model(x), y)


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
    """Asking for state_dict() at every step, on one rank, and broadcasting what nobody has loaded, changes no bit."""
    ends = []
    for looks in (False, True):
        model, optimizer = made(FEW, OPTIMIZERS[name])
        for _ in range(4):
            train(model, optimizer, 3)
            if looks and hvd.rank() == 1:
                optimizer.state_dict()
            if looks:
                broadcast_optimizer_state(optimizer, 0)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]


def test_gradients_of_a_fresh_optimizer_are_zeros_after_a_broadcast():
    """As with stock Horovod."""
    model, optimizer = made(FEW)
    broadcast_optimizer_state(optimizer, 0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@each_optimizer
def test_a_frozen_layer_comes_to_rest_as_with_stock_horovod(name):
    """A layer is frozen after 20 steps, and thawed after 100 more."""
    moves = {}
    for way in ("stock", "ours"):
        model = smooth_model()
        factory = hvd.DistributedOptimizer if way == "stock" else DistributedOptimizer
        compression = hvd.Compression.none if way == "stock" else Compression.dgc(0.005, compress_1d=True)
        optimizer = factory(OPTIMIZERS[name](model), model.named_parameters(), compression)
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


def test_networks_that_take_turns_keep_their_residuals():
    """Nothing is dropped of a layer that is frozen in every second step."""
    kept = []
    for turns in (False, True):
        model, optimizer = made(FEW, OPTIMIZERS["sgd"])
        for step in range(30):
            model[2].requires_grad_(not turns or step % 2 == 0)
            train(model, optimizer, 1)
        kept.append(float(abs(session(optimizer).exchange.state_arrays()["2.weight"]["v"]).max()))
    assert kept[1] > 0.1 * kept[0] > 0


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
            _loss(model).backward()
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


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_in_words(way):
    with pytest.raises(UnsupportedUse, match=r"state_dict\(\)"):
        way(made(FEW)[1])


def test_a_second_synchronization_is_warned_of():
    """Of a script that lets step() synchronize again."""
    model, optimizer = made(FEW)
    _loss(model).backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.synchronize()
        optimizer.step()
    (warning,) = seen
    assert "without optimizer.skip_synchronize() context" in str(warning.message)


class _Around(torch.optim.SGD):
    """Another optimizer inside, which makes the step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.02)
        self.base = torch.optim.SGD(self.param_groups, lr=0.02)

    def step(self, closure: Any = None) -> None:
        """As that of the one inside."""
        self.base.step()


def test_methods_of_the_script_on_the_object_that_is_wrapped():
    """They are of that object alone, as in stock: one around zero_grad() had cleared gradients behind our back."""
    ends, calls = [], []
    everything = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
    for factory, compression in (
        (hvd.DistributedOptimizer, hvd.Compression.none),
        (DistributedOptimizer, everything),
    ):
        model = smooth_model()
        optimizer = momentum_sgd(model)
        for name in ("step", "zero_grad", "state_dict"):
            setattr(optimizer, name, lambda name=name: calls.append(name))
        optimizer = factory(optimizer, model.named_parameters(), compression=compression)
        train(model, optimizer, 3)
        optimizer.state_dict()
        ends.append(weights(model))
    assert calls == [] and float((ends[0] - ends[1]).abs().max()) < 1e-5


def test_another_optimizer_inside_of_the_one_that_is_wrapped():
    model, optimizer = made(FEW, _Around)
    train(model, optimizer, 3)
    optimizer.flush()
    error = error_of(optimizer.base.step)
    assert "its inner optimizer .base (SGD) was stepped outside of _Around.step()" in error


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
        _loss(model).backward()
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
