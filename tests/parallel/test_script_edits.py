"""Scripts that change a step, its gradients, parameter groups or the optimizer's methods, beside stock Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression
from tests.helpers.ddp_training import step
from tests.helpers.errors import error_of
from tests.helpers.interrupted import made
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
COMPRESSIONS = {
    "momentum": Compression.dgc(1.0, factor_masking=False, min_numel=16, **UNROUNDED),
    "feedback": Compression.topk(1.0, min_numel=16, **UNROUNDED),
    "sparse": Compression.dgc(0.1, min_numel=16),
}


def _wrapped(way: str, make: Callable[[nn.Module], torch.optim.Optimizer] = momentum_sgd) -> tuple[Any, Any]:
    if way != "stock":
        return made(COMPRESSIONS[way], make)
    model = smooth_model()
    return model, hvd.DistributedOptimizer(make(model), model.named_parameters())


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
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.synchronize()
            if i < 12:
                layer.weight.grad = None
            before = layer.weight.detach().clone()
            with optimizer.skip_synchronize():
                optimizer.step()
            moves[way].append(float((layer.weight.detach() - before).norm()))
    assert _told(optimizer) == _on_rank_0("taken away")
    assert max(moves["sparse"][:12]) == 0 and 0 < max(moves["sparse"][12:]) < 3 * max(moves["stock"][12:])
    same_on_ranks(fingerprint(model))


def test_an_update_that_is_dropped_is_told_of():
    model, optimizer = _wrapped("sparse")
    x, y = next(iter(batches(1, hvd.rank())))
    F.mse_loss(model(x), y).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    assert _told(optimizer) == _on_rank_0("dropped")


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
            if what == "dropped by the model":
                model.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    return error_of(train), weights(model), optimizer


@pytest.mark.parametrize("what", ["none", "added to", "dropped by the model"])
def test_an_update_that_was_not_applied_does_not_enter_a_momentum_again(what):
    """It did so without a word, 1.7 times as much at each step; nor was told what the model's zero_grad drops."""
    error, stock, _ = _leaves_updates("stock", what)
    assert error == ""
    for way in ("feedback", "momentum"):
        error, end, optimizer = _leaves_updates(way, what)
        assert _told(optimizer) == (_on_rank_0("dropped") if what == "dropped by the model" else []), way
        if (what, way) == ("added to", "momentum"):
            assert error.startswith("UnsupportedUse: backward() was called between synchronize() and step()")
            continue
        assert error == "", way
        if (what, way) == ("dropped by the model", "momentum"):
            assert distance(end, stock) > 1e-3  # of which rank 0 is told
        else:
            assert distance(end, stock) < 1e-5, way


@pytest.mark.parametrize("late", [True, False])
def test_a_hook_that_comes_after_the_wrapping_is_told_of(late):
    """One from before is not."""

    def make(model: Any) -> torch.optim.Optimizer:
        if not late:
            model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
        return momentum_sgd(model)

    model, optimizer = made(Compression.dgc(0.1), make)
    if late:
        model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    for x, y in batches(2, hvd.rank()):
        step(model, optimizer, x, y)
    assert _told(optimizer) == (_on_rank_0("late hook") if late else [])


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
    x, y = next(iter(batches(1, hvd.rank())))
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    assert optimizer.step() == "done"
    saved = optimizer.state_dict(light=True)
    optimizer.load_state_dict(saved, strict=False)
    assert saved["light"] is True and optimizer.strict is False
