"""The adapter over torch.distributed, on ranks that know no Horovod: what works, what not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
from tests.helpers.adapters import on_adapters
from tests.helpers.ddp_training import made, made_plain, one_batch, sgd, train
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import batches, distance, fingerprint, nesterov, smooth_model, weights
from tests.helpers.run import everything

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_number_of_ranks = pytest.mark.usefixtures("workers")
SAME = 1e-5
FEW = Compression.dgc(0.1)


@each_number_of_ranks
def test_a_step_that_was_taken_before_is_refused():
    """As accelerate takes it under fp16: it had applied momentum a second time."""
    model = DistributedDataParallel(smooth_model())
    optimizer = sgd(model)
    taken = optimizer.step
    register(model, optimizer, Compression.dgc(0.05))
    train(model, optimizer, 2)
    x, y = one_batch()
    F.mse_loss(model(x), y).backward()
    before = fingerprint(model)
    assert error_of(taken).startswith("UnsupportedUse: this step() was taken")
    assert fingerprint(model) == before
    optimizer.step()


@each_number_of_ranks
def test_layers_that_were_frozen_since_ddp_was_made_stay():
    model = DistributedDataParallel(smooth_model(), find_unused_parameters=True)
    first, second = model.module[0].weight.requires_grad_(False), model.module[2].weight
    before = [each.detach().clone() for each in (first, second)]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, 0.9)
    register(model, optimizer, Compression.dgc(0.05))
    train(model, optimizer, 4)
    assert torch.equal(first, before[0]) and not torch.equal(second, before[1])


@each_number_of_ranks
def test_a_grad_scaler_skips_the_same_steps():
    """A gradient of one rank that is not finite makes every rank skip that step."""
    scales = []
    for compression in (None, FEW):
        model, optimizer = made(compression, partial(sgd, nesterov=True, lr=0.02))
        scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=4)
        for number, (x, y) in enumerate(batches(10, dist.get_rank())):
            optimizer.zero_grad()
            before = weights(model)
            bad = number == 5 and dist.get_rank() == 1
            scaler.scale(F.mse_loss(model(x * torch.inf if bad else x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert number != 5 or torch.equal(before, weights(model))
        scales.append(scaler.get_scale())
        same_on_ranks(fingerprint(model))
    assert scales[0] == scales[1]


@each_number_of_ranks
def test_what_a_message_says_to_do_works():
    """A model after an error of its DDP, and once it has been put into another one."""
    (x, y), plain = one_batch(), smooth_model()

    def steps(model: Any, optimizer: Any, passes: int = 1) -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            F.mse_loss(model(x), y).backward()
        optimizer.step()

    model, optimizer = made(FEW, inner=plain)  # each takes the place of the one before, which ends
    accumulated = error_of(lambda: steps(model, optimizer, passes=2))
    assert "make a new DistributedDataParallel and register it with a new optimizer" in accumulated
    model, optimizer = made(FEW, inner=plain)
    another = error_of(lambda: steps(DistributedDataParallel(plain), optimizer))
    assert "or the model has been put into another DistributedDataParallel" in another
    model, optimizer = made(FEW, inner=plain)
    F.mse_loss(model(x), y).backward()
    optimizer.zero_grad()  # an update is given up
    steps(model, optimizer)
    assert optimizer.compression_stats()["steps"] == 2
    same_on_ranks(accumulated, another, fingerprint(plain))


def _echo(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    raise NotImplementedError


def _ddp(change: Callable[[Any], None] = lambda model: None) -> DistributedDataParallel:
    model = DistributedDataParallel(smooth_model())
    change(model)
    return model


def _register(model: Any, make: Callable[[Any], Any] = sgd, **more: Any) -> Any:
    return register(model, make(model), FEW, **more)


def _more(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return optimizer


def _plain(model: nn.Module) -> None:
    DistributedOptimizer(sgd(model), model.named_parameters(), FEW)


def _stepped_in_backward() -> nn.Module:
    model = smooth_model()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return model


def _zero(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


def _post_local(model: nn.Module) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(2, process_group=dist.group.WORLD))


def _without_an_exchange() -> None:
    (x, y), (model, optimizer) = one_batch(), made(FEW)
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    optimizer.step()


def _accumulated() -> None:
    (x, y), (model, _optimizer) = one_batch(), made(FEW)
    for _ in range(2):
        F.mse_loss(model(x), y).backward()


def _joined() -> None:
    (x, y), (model, _optimizer) = one_batch(), made(FEW)
    with model.join():
        F.mse_loss(model(x), y).backward()


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "plain model": (
        "ConfigError: model must be a DistributedDataParallel, got Sequential", lambda: _register(smooth_model())),
    "mixed_precision": (
        "UnsupportedUse: this DistributedDataParallel has mixed_precision; use torch.autocast",
        lambda: _register(_ddp(lambda model: setattr(model, "mixed_precision", object())))),
    "half": (
        "UnsupportedUse: 6 parameters are in the model but not in the optimizer ('2.weight' is the first)",
        lambda: _register(_ddp(), lambda model: torch.optim.SGD(list(model.parameters())[:2], 0.1))),
    "more": ("UnsupportedUse: 1 parameters of the optimizer", lambda: _register(_ddp(), _more)),
    "hook": (
        "UnsupportedUse: this DistributedDataParallel has a communication hook already",
        lambda: _register(_ddp(lambda model: model.register_comm_hook(None, _echo)))),
    "DistributedOptimizer of DDP": ("belongs to a model in DistributedDataParallel", lambda: _plain(_ddp())),
    "ZeRO": (
        "UnsupportedUse: ZeroRedundancyOptimizer is a distributed optimizer: it shards its state",
        lambda: _register(_ddp(), _zero)),
    "auto": ("use DDP and register()", lambda: made_plain(Compression.auto(), nesterov)),
    "post-local": (
        "UnsupportedUse: PostLocalSGDOptimizer is a distributed optimizer", lambda: _register(_ddp(), _post_local)),
    "in backward": (
        "UnsupportedUse: '0.weight' is stepped by an optimizer in the backward pass",
        lambda: _plain(_stepped_in_backward())),
    "inside of DDP": (
        "got Sequential; a DistributedDataParallel is around it already: pass that. transformers.Trainer",
        lambda: _register((model := _ddp()) and model.module)),
    "sparse": (
        "UnsupportedUse: 'module' has sparse gradients",
        lambda: _register(DistributedDataParallel(nn.Embedding(9, 4, sparse=True)), partial(sgd, momentum=0))),
    "join": ("UnsupportedUse: Join does not work with a compressed model", _joined),
    "no exchange": ("UnsupportedUse: step() without gradients that have been exchanged", _without_an_exchange),
    "not in the group": (  # what new_group gives to a rank that is not in it
        "is not in the given process_group",
        lambda: _register(_ddp(), process_group=dist.GroupMember.NON_GROUP_MEMBER)),
    "accumulated": ("UnsupportedUse: backward() was called again before step()", _accumulated),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    words, attempt = REFUSED[name]
    error = error_of(attempt)
    assert words in error, error


def _ddp_alone() -> torch.Tensor:
    """Its weights after 12 steps."""
    model, optimizer = made(None, nesterov)
    train(model, optimizer)
    return weights(model)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_model_that_is_compiled(where):
    """torch.compile around DDP, or inside of it."""
    inner = smooth_model()
    ddp = DistributedDataParallel(torch.compile(inner, backend="aot_eager") if where == "inside" else inner)
    model = torch.compile(ddp, backend="aot_eager") if where == "around" else ddp
    optimizer = register(model, nesterov(ddp), everything())
    names = [session(optimizer).exchange.names[p] for p in ddp.parameters()]
    assert names == list(dict(smooth_model().named_parameters()))
    train(model, optimizer)
    assert distance(_ddp_alone(), weights(ddp)) <= SAME


@on_adapters("DDP", "without DDP")
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_is_compiled(adapter, whole):
    """torch.compile of ``optimizer.step()``, or of a whole step."""
    model, optimizer = adapter.made(everything(), nesterov)

    def forward_and_backward(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()

    def whole_step(x: torch.Tensor, y: torch.Tensor) -> None:
        forward_and_backward(x, y)
        optimizer.step()

    compiled = torch.compile(whole_step if whole else lambda: optimizer.step(), backend="aot_eager")
    for x, y in batches(12, dist.get_rank()):
        if whole:
            compiled(x, y)
        else:
            forward_and_backward(x, y)
            compiled()
    assert distance(_ddp_alone(), weights(model)) <= SAME
