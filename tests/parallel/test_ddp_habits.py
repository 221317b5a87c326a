"""What scripts do with an optimizer over torch.distributed: wrappers, other methods that step, what DDP leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch.ddp import Compression
from tests.helpers.adapters import Adapter, on_adapters
from tests.helpers.ddp_training import made, made_plain, one_batch, sgd, step
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.05, min_numel=64)
ALL = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
CHOICES = {"dgc": FEW, "local": Compression.local(steps=2, density=0.05, min_numel=64), "auto": Compression.auto()}
each_choice = pytest.mark.parametrize("name", CHOICES)


class _Keeper:
    """Something of the script that has taken a method, and counts."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method, self.calls = method, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.method(*args, **kwargs)


def _averaging(optimizer: Any, p: torch.Tensor) -> list[torch.Tensor]:
    """A function of the script around ``step``, in a closure: it collects the weights after each."""
    taken, seen = optimizer.step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        result = taken(*args, **kwargs)
        seen.append(p.detach().clone())
        return result

    optimizer.step = step
    return seen


class _Script:
    """Wrappers around an optimizer's methods, and a scheduler below them; a hook that steps call."""

    def __init__(self, optimizer: Any, p: torch.Tensor) -> None:
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        self.hooked: list[int] = []
        optimizer.register_step_post_hook(lambda *_: self.hooked.append(1))
        self.seen = _averaging(optimizer, p)
        self.keepers = {method: _Keeper(getattr(optimizer, method)) for method in ("zero_grad", "state_dict")}
        vars(optimizer).update(self.keepers)


@pytest.mark.parametrize(
    ("adapter", "name"), [*((Adapter("DDP"), name) for name in CHOICES), (Adapter("without DDP"), "dgc")]
)
def test_wrappers_around_methods_stay(adapter, name):
    """Those from before the optimizer is registered, or after: one around ``step`` was dropped without a word."""
    ends = []
    for before in (True, False):
        scripts = []

        def make(model: Any, before: bool = before, scripts: list[_Script] = scripts) -> torch.optim.Optimizer:
            optimizer = sgd(model)
            if before:
                scripts.append(_Script(optimizer, next(model.parameters())))
            return optimizer

        model, optimizer = adapter.made(CHOICES[name], make)
        script = scripts[0] if before else _Script(optimizer, next(model.parameters()))
        for x, y in batches(4, dist.get_rank()):
            step(model, optimizer, x, y)
            script.schedule.step()
        optimizer.state_dict()
        seen = [float(x.double().sum()) for x in script.seen]
        assert len(set(seen)) == len(script.hooked) == 4 and optimizer.param_groups[0]["lr"] == 0.05 / 4
        assert {method: keeper.calls for method, keeper in script.keepers.items()} == {"zero_grad": 4, "state_dict": 1}
        stats = optimizer.compression_stats()
        ends.append([fingerprint(model), seen, stats["steps"], stats["bytes_sent"] if name != "auto" else 0])
    assert ends[0] == ends[1]


class Sam(torch.optim.Optimizer):
    """As davda54/sam has it: weights are moved for a second gradient, which an optimizer inside steps with."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Move, by what this rank's own gradient says."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Move back, and step."""
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        """Not used."""
        raise NotImplementedError


class ByHand(torch.optim.SGD):
    """An optimizer that is stepped by a method which makes the update itself."""

    @torch.no_grad()
    def second_step(self) -> None:
        """Plain SGD."""
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def _sam(model: nn.Module) -> Sam:
    return Sam(model.parameters(), lr=0.05, momentum=0.9)


def _train_sam(model: Any, sam: Any, spoilt: int = -1) -> None:
    for i, (x, y) in enumerate(batches(4, dist.get_rank())):
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        sam.first_step()
        loss = F.mse_loss(model(x), y)
        (loss * torch.nan if i == spoilt and dist.get_rank() == 1 else loss).backward()
        sam.second_step()


def test_an_optimizer_inside_of_another_is_registered():
    """NaN of one rank got into the weights of all."""
    ends = []
    for compression, spoilt in ((None, -1), (ALL, -1), (ALL, 2)):
        sams: list[Sam] = []

        def make(model: nn.Module, sams: list[Sam] = sams) -> torch.optim.Optimizer:
            sams.append(_sam(model))
            return sams[0].base

        model, _ = made(compression, make)
        _train_sam(model, sams[0], spoilt)
        ends.append(weights(model))
    assert distance(ends[0], ends[1]) < 1e-5 and ends[2].isfinite().all()
    same_on_ranks(fingerprint(model))


INNER = "UnsupportedUse: Sam was passed to register() or DistributedOptimizer(), but its inner"


@each_choice
def test_an_optimizer_whose_inner_one_is_stepped_is_an_error(name):
    """Replicas were not compared, and a notice said what was not so."""
    model, sam = made(CHOICES[name], _sam)
    before = fingerprint(model)
    error = error_of(lambda: _train_sam(model, sam))
    assert error.startswith(INNER) and "Pass optimizer.base instead" in error and fingerprint(model) == before
    same_on_ranks(error)


def test_an_optimizer_whose_inner_one_is_stepped_is_an_error_without_ddp():
    _model, sam = made_plain(FEW, _sam)
    error = error_of(sam.base.step)
    assert error.startswith(INNER) and "Pass optimizer.base instead" in error
    same_on_ranks(error)


@pytest.mark.parametrize("then", ["zero_grad", "backward"])
def test_an_optimizer_that_is_stepped_by_another_method_is_an_error(then):
    model, by_hand = made(FEW, lambda model: ByHand(model.parameters(), lr=0.05))
    x, y = one_batch()
    F.mse_loss(model(x), y).backward()
    by_hand.second_step()
    error = error_of(by_hand.zero_grad if then == "zero_grad" else F.mse_loss(model(x), y).backward)
    assert "ByHand has applied an update without step() (its other methods: second_step())" in error
    same_on_ranks(error)


class _TwoOutputs(nn.Module):
    """A body with two heads, of which the loss may leave out one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(32, 48), nn.Linear(48, 1), nn.Linear(48, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.left(hidden), self.right(hidden)


class _Unused(nn.Module):
    """A layer that the forward pass leaves out, last in DDP's order or first."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        if first:
            self.extra = nn.Linear(64, 64)
        self.used = nn.Linear(32, 1)
        if not first:
            self.extra = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _penalty(model: Any, x: torch.Tensor, as_said: bool = False) -> torch.Tensor:
    x = x.clone().requires_grad_(True)
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return gradient.square().sum() + (0 * output.sum() if as_said else 0)


UNUSED: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], str]] = {
    "a layer, first": (
        lambda: _Unused(True), lambda model, x, _: model(x).square().mean(), "'extra.weight', 'extra.bias'"),
    "a layer, last": (
        lambda: _Unused(False), lambda model, x, _: model(x).square().mean(), "'extra.weight', 'extra.bias'"),
    "an output": (_TwoOutputs, lambda model, x, _: model(x)[0].square().mean(), "'right.weight', 'right.bias'"),
    "a gradient penalty": (smooth_model, _penalty, "'6.bias'"),
}  # fmt: skip
each_unused = pytest.mark.parametrize("what", UNUSED)


@each_unused
@pytest.mark.parametrize("megabytes", [25, 0.0001])
def test_a_parameter_that_takes_no_part_in_the_loss_is_named(what, megabytes):
    """Three causes were named, and none was the one; with DDP's buckets of two sizes."""
    make, loss, names = UNUSED[what]
    model, optimizer = made(FEW, inner=make(), bucket_cap_mb=megabytes)
    loss(model, one_batch()[0], False).backward()
    error = error_of(optimizer.step)
    assert f"no gradient for {names}, but DistributedDataParallel" in error
    assert "pass find_unused_parameters=True" in error
    same_on_ranks(error)


@on_adapters("DDP", "without DDP")
@each_unused
def test_what_is_said_of_a_parameter_that_takes_no_part_works(adapter, what):
    make, loss, _ = UNUSED[what]
    torch.manual_seed(0)
    options = {"find_unused_parameters": loss is not _penalty} if adapter.name == "DDP" else {}
    model, optimizer = adapter.made(FEW, inner=make(), **options)
    for x, _ in batches(3, dist.get_rank()):
        optimizer.zero_grad()
        loss(model, x, True).backward()
        optimizer.step()
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize("finds", [False, True])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("frozen", "no gradient for 'right.weight', 'right.bias', but Distributed"),
        ("accumulated", "left out a parameter (find_unused_parameters=True"),
    ],
)
def test_a_parameter_that_is_left_out_later_is_told_of(way, words, finds):
    """Three causes were named, and none was the one.

    A parameter is frozen after DDP was made, or only an earlier pass of the step has used it.
    """
    model, optimizer = made(FEW, inner=_TwoOutputs(), find_unused_parameters=finds)

    def train() -> None:
        for x, _ in batches(3, dist.get_rank()):
            optimizer.zero_grad(set_to_none=False)
            if way == "accumulated":
                with model.no_sync():
                    sum(y.square().mean() for y in model(x)).backward()
            model.module.right.requires_grad_(way == "accumulated")
            model(x)[0].square().mean().backward()
            optimizer.step()

    error = error_of(train)
    assert error == "" if finds else words in error
    same_on_ranks(error, fingerprint(model))
