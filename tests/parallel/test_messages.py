"""A script's habits, bad input and ranks that disagree: what is told, on every rank, without a hang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn

from dgc_horovod import __version__
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from dgc_horovod.torch.wrapping import checks
from tests.helpers.adapters import Adapter
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.together import call_each
from tests.helpers.training import first_loss, momentum_sgd, smooth_model, train
from tests.parallel import test_disagreement

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def _wrapped(
    model: Any = None,
    compression: Any = None,
    stock: Callable[[Any], Any] = momentum_sgd,
    names: Any = None,
    **more: Any,
) -> Any:
    model, compression = model or smooth_model(), compression or Compression.dgc(0.1)
    return DistributedOptimizer(stock(model), names or model.named_parameters(), compression, **more)


def _between(action: Callable[[Any], Any]) -> None:
    """Do something between backward() and step()."""
    model = smooth_model()
    optimizer = _wrapped(model)
    first_loss(model).backward()
    try:
        action(optimizer)
    finally:
        optimizer.step()


def _gradients_removed() -> None:
    """By the model's own zero_grad, while a tensor that was not used keeps its bucket from leaving."""
    model = smooth_model()
    model.unused = nn.Parameter(torch.zeros(40, 40))
    optimizer = _wrapped(model)
    first_loss(model).backward()
    model.zero_grad()
    optimizer.step()


def _stock_given_ours() -> None:
    model = smooth_model()
    train(model, hvd.DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.1)), 1)


def _epoch_unknown() -> None:
    model = smooth_model()
    train(model, _wrapped(model, Compression.dgc(0.01, warmup=WarmupSchedule(epochs=2))), 1)


def _step_twice() -> None:
    model = smooth_model()
    optimizer = _wrapped(model)
    train(model, optimizer, 2)
    optimizer.step()


def _scaler_without_synchronize(passed: bool) -> None:
    model, scaler = smooth_model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = _wrapped(model, **{"grad_scaler": scaler} if passed else {})
    scaler.scale(first_loss(model)).backward()
    scaler.step(optimizer)


def _unfrozen_later() -> None:
    model = smooth_model()
    model[0].weight.requires_grad_(False)
    train(model, _wrapped(model), 2, before_backward=lambda step: model[0].weight.requires_grad_(step == 1))


def _dampened(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "wrap twice": ("already wrapped", lambda: _wrapped(stock=_wrapped)),
    "add_param_group": ("before wrapping|first, then wrap", lambda: _wrapped().add_param_group({"params": []})),
    "adasum": ("Average or hvd.Sum", lambda: _wrapped(op=hvd.Adasum)),
    "predivide": (
        "must be a positive number, got 0.0; leave it at 1.0", lambda: _wrapped(gradient_predivide_factor=0.0)),
    "predivide, a text": (
        "ConfigError: gradient_predivide_factor must be a positive number, got '2'",
        lambda: _wrapped(gradient_predivide_factor="2")),
    "passes, a text": (
        "ConfigError: backward_passes_per_step must be a whole number >= 1, got '2'",
        lambda: _wrapped(backward_passes_per_step="2")),
    "duplicate names": (
        "repeated names: a", lambda: _wrapped(model := smooth_model(), names=[("a", p) for p in model.parameters()])),
    "missing names": (
        "no name in named_parameters",
        lambda: _wrapped(model := smooth_model(), names=list(model.named_parameters())[1:])),
    "not called": (r"Compression.dgc\(density=0.001\)", lambda: _wrapped(compression=Compression.dgc)),
    "dampening": ("dampening=0", lambda: _wrapped(stock=_dampened)),
    "zero_grad between": ("before step", lambda: _between(lambda optimizer: optimizer.zero_grad())),
    "gradients removed": (r"was removed between backward\(\) and step\(\)", _gradients_removed),
    "stock given ours": ("dgc_horovod.torch import DistributedOptimizer.*dgcrun", _stock_given_ours),
    "epoch unknown": ("steps_per_epoch", _epoch_unknown),
    "arguments swapped": (
        "second argument is named_parameters",
        lambda: DistributedOptimizer(momentum_sgd(smooth_model()), Compression.dgc())),
    "model for optimizer": (
        "must be a torch.optim.Optimizer, got Sequential", lambda: _wrapped(stock=lambda model: model)),
    "step twice": ("no backward pass", _step_twice),
    "unscaled too early": (
        r"optimizer.synchronize\(\) before scaler.unscale_", lambda: _scaler_without_synchronize(passed=True)),
    "scaler not passed": ("pass grad_scaler=scaler", lambda: _scaler_without_synchronize(passed=False)),
    "loaded too early": (
        "call it after step", lambda: _between(lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()))),
    "unfrozen later": ("'0.weight' did not require a gradient", _unfrozen_later),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_error_messages(case):
    words, attempt = REFUSED[case]
    error = error_of(attempt)
    assert re.search(words, error), error


def _renamed(last: bool) -> Any:
    named = [(f"{'other.' if last else ''}{name}", p) for name, p in smooth_model().named_parameters()]
    return _wrapped(nn.ParameterList([p for _, p in named]), names=named)


def _other_version(last: bool) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "__version__", "0.0" if last else __version__)
        return _wrapped()


DIFFERENT: dict[str, tuple[str, Callable[[bool], Any]]] = {  # what is done on the last rank, or on another
    "scaler": (
        "grad_scaler: rank 0 has True, rank 1 has False",
        lambda last: _wrapped(grad_scaler=None if last else torch.amp.GradScaler("cpu"))),
    "groups": ("bucket boundaries: rank 0 has", lambda last: _wrapped(num_groups=2 if last else 3)),
    "shapes": (
        "shapes: rank 0 has 0.weight (65, 32), rank 1 has 0.weight (64, 32)",
        lambda last: _wrapped(nn.Sequential(nn.Linear(32, 64 if last else 65)))),
    "names": ("names: rank 0 has 0.weight, rank 1 has other.0.weight", _renamed),
    "tensor count": (
        "tensor count: rank 0 has 4, rank 1 has 2", lambda last: _wrapped(smooth_model()[: 2 if last else 4])),
    "passes": (
        "backward_passes_per_step: rank 0 has 1, rank 1 has 2",
        lambda last: _wrapped(backward_passes_per_step=2 if last else 1)),
    "version": (f"version: rank 0 has {__version__}, rank 1 has 0.0", _other_version),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_whose_calls_differ_all_raise_the_same(case):
    words, action = DIFFERENT[case]
    error = error_of(lambda: action(hvd.rank() == hvd.size() - 1))
    assert error.startswith("RankMismatch:") and words in error, error
    same_on_ranks(error)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(2, controller="mpi")
def test_the_same_over_mpi():
    call_each(test_error_messages, test_ranks_whose_calls_differ_all_raise_the_same)
    for name, what in test_disagreement.SAID:
        if name == "Horovod":
            test_disagreement.test_ranks_that_disagree_all_raise_the_same(Adapter(name), what)
