"""What scripts do with an optimizer over torch.distributed, beside its step: wrappers, other methods, trial steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
from tests.helpers.errors import error_of
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights

FEW = Compression.dgc(0.05, min_numel=64)
ALL = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
CHOICES = {"dgc": FEW, "local": Compression.local(steps=2, density=0.05, min_numel=64), "auto": Compression.auto()}


def _sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def _steps(model: Any, optimizer: Any, steps: int = 4, step: Callable[[], Any] | None = None) -> None:
    for x, y in batches(steps, dist.get_rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        (step or optimizer.step)()


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


def wrapped_methods() -> dict[str, Any]:
    """Wrappers around methods, and a scheduler below them, that are there before the optimizer is registered or after.

    For each choice: weights, what the script has seen and counted, and learning rates.
    """
    found: dict[str, Any] = {}
    for name, before in itertools.product([*CHOICES, "without DDP"], (True, False)):
        inner = smooth_model()
        model: Any = inner if name == "without DDP" else DistributedDataParallel(inner)
        optimizer = _sgd(model)

        def made(model: Any = model, optimizer: Any = optimizer, name: str = name) -> None:
            if name == "without DDP":
                DistributedOptimizer(optimizer, model.named_parameters(), FEW)
            else:
                register(model, optimizer, CHOICES[name])

        if not before:
            made()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        seen = _averaging(optimizer, inner[0].weight)
        keepers = {method: _Keeper(getattr(optimizer, method)) for method in ("zero_grad", "state_dict")}
        vars(optimizer).update(keepers)
        if before:
            made()
        _steps(
            model, optimizer, step=lambda optimizer=optimizer, schedule=schedule: (optimizer.step(), schedule.step())
        )
        optimizer.state_dict()
        stats = optimizer.compression_stats()
        found.setdefault(name, []).append(
            {
                "weights": fingerprint(model),
                "seen": [float(x.double().sum()) for x in seen],
                "calls": {method: keeper.calls for method, keeper in keepers.items()},
                "rate": optimizer.param_groups[0]["lr"],
                "steps": stats["steps"],
                "sent": stats["bytes_sent"] if name != "auto" else 0,
            }
        )
    return found


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


class Around(torch.optim.Optimizer):
    """A wrapper whose ``step`` is that of the optimizer inside, and which has other methods (Lookahead)."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.inside = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.inside.param_groups

    def sync_lookahead(self) -> None:
        """Another method."""

    def step(self, closure: Any = None) -> None:
        """As that of the optimizer inside."""
        self.inside.step()


class ByHand(torch.optim.SGD):
    """An optimizer that is stepped by a method which makes the update itself."""

    @torch.no_grad()
    def second_step(self) -> None:
        """Plain SGD."""
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


def _train_sam(model: Any, sam: Any, spoilt: int = -1) -> None:
    for i, (x, y) in enumerate(batches(4, dist.get_rank())):
        with model.no_sync():
            F.mse_loss(model(x), y).backward()
        sam.first_step()
        loss = F.mse_loss(model(x), y)
        (loss * torch.nan if i == spoilt and dist.get_rank() == 1 else loss).backward()
        sam.second_step()


def other_methods() -> dict[str, Any]:
    """Optimizers that are stepped by other methods; the one inside registered, or the one around it."""
    found: dict[str, Any] = {}
    ends = []
    for way in ("stock", "inside", "not finite"):
        model = DistributedDataParallel(smooth_model())
        sam = Sam(model.parameters(), lr=0.05, momentum=0.9)
        if way != "stock":
            register(model, sam.base, ALL)
        _train_sam(model, sam, spoilt=2 if way == "not finite" else -1)
        ends.append(weights(model))
    found["inside"] = distance(ends[0], ends[1])
    found["finite"] = bool(ends[2].isfinite().all())
    for name, compression in CHOICES.items():
        model = DistributedDataParallel(smooth_model())
        sam = register(model, Sam(model.parameters(), lr=0.05, momentum=0.9), compression)
        before = fingerprint(model)
        found[f"around, {name}"] = error_of(lambda model=model, sam=sam: _train_sam(model, sam))
        found[f"stays, {name}"] = fingerprint(model) == before
    plain = smooth_model()
    sam = DistributedOptimizer(Sam(plain.parameters(), lr=0.05), plain.named_parameters(), FEW)
    found["around, without DDP"] = error_of(sam.base.step)
    ends = []
    for compression in (None, ALL, Compression.auto()):
        model = DistributedDataParallel(smooth_model())
        optimizer = Around(model.parameters(), lr=0.05, momentum=0.9)
        if compression is not None:
            register(model, optimizer, compression)
        _steps(model, optimizer)
        ends.append(weights(model))
        if compression is ALL:
            optimizer.flush()
    found["a wrapper"] = [distance(ends[0], end) for end in ends[1:]]
    for name in ("zero_grad", "backward"):
        model = DistributedDataParallel(smooth_model())
        by_hand = register(model, ByHand(model.parameters(), lr=0.05), FEW)
        x, y = next(iter(batches(1, dist.get_rank())))
        F.mse_loss(model(x), y).backward()
        by_hand.second_step()
        again = by_hand.zero_grad if name == "zero_grad" else F.mse_loss(model(x), y).backward
        found[f"by hand, {name}"] = error_of(again)
    return found


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


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor]]] = {
    "a layer, first": (lambda: _Unused(True), lambda model, x, _: model(x).square().mean()),
    "a layer, last": (lambda: _Unused(False), lambda model, x, _: model(x).square().mean()),
    "an output": (_TwoOutputs, lambda model, x, _: model(x)[0].square().mean()),
    "a gradient penalty": (smooth_model, _penalty),
}


def unused() -> dict[str, Any]:
    """What is said where a parameter takes no part in the loss, with DDP's buckets of two sizes; and what works."""
    found: dict[str, Any] = {}
    for (name, (make, loss)), cap in itertools.product(LOSSES.items(), (25, 0.0001)):
        model = DistributedDataParallel(make(), bucket_cap_mb=cap)
        optimizer = register(model, _sgd(model), FEW)
        x, _ = next(iter(batches(1, dist.get_rank())))
        loss(model, x, False).backward()
        found[f"{name}, {cap}"] = error_of(optimizer.step)
    for name, (make, loss) in LOSSES.items():
        for way in ("DDP", "without DDP"):
            torch.manual_seed(0)
            inner = make()
            if way == "DDP":
                model = DistributedDataParallel(inner, find_unused_parameters=loss is not _penalty)
                optimizer = register(model, _sgd(model), FEW)
            else:
                model, optimizer = inner, DistributedOptimizer(_sgd(inner), inner.named_parameters(), FEW)

            def train(model: Any = model, optimizer: Any = optimizer, loss: Any = loss) -> None:
                for x, _ in batches(3, dist.get_rank()):
                    optimizer.zero_grad()
                    loss(model, x, True).backward()
                    optimizer.step()

            found[f"{name}, {way}"] = error_of(train) or fingerprint(model)
    return found


def left_out_later() -> dict[str, str]:
    """A parameter that is frozen after DDP was made, and one that only an earlier pass of the step has used."""

    def train(model: Any, optimizer: Any, freezes: bool) -> None:
        for x, _ in batches(3, dist.get_rank()):
            optimizer.zero_grad(set_to_none=False)
            if not freezes:
                with model.no_sync():
                    sum(y.square().mean() for y in model(x)).backward()
            model.module.right.requires_grad_(not freezes)
            model(x)[0].square().mean().backward()
            optimizer.step()

    found: dict[str, str] = {}
    for name, finds in itertools.product(("frozen", "accumulated"), (False, True)):
        model = DistributedDataParallel(_TwoOutputs(), find_unused_parameters=finds)
        optimizer = register(model, _sgd(model), FEW)
        found[f"{name}, {finds}"] = error_of(partial(train, model, optimizer, name == "frozen")) or fingerprint(model)
    return found


def _matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 1, bias=False))


def filled_state() -> dict[str, Any]:
    """torch.distributed.checkpoint asks for the state before the first step, on rank 0 alone too, and gives it back.

    For each optimizer: the learning rate afterwards, whether weights stay, and weights trained with it and without.
    """
    found: dict[str, Any] = {}
    kinds = {"SGD": {}, "RMSprop": {}, "Adagrad": {}, "Muon": {}, "AdamW": {}, "SGD, momentum": {"momentum": 0.9}}
    ways = [("dgc", kind) for kind in kinds] + [(way, kind) for way in ("local", "auto") for kind in ("SGD", "RMSprop")]
    for way, kind in [*ways, ("without DDP", "SGD"), ("without DDP", "RMSprop")]:
        ends = []
        for asks in (False, True):
            model: Any = _matrices() if way == "without DDP" else DistributedDataParallel(_matrices())
            optimizer = getattr(torch.optim, kind.split(",")[0])(model.parameters(), lr=0.01, **kinds[kind])
            if way == "without DDP":
                DistributedOptimizer(optimizer, model.named_parameters(), FEW)
            else:
                register(model, optimizer, CHOICES[way])
            before = fingerprint(model)
            if asks and dist.get_rank() == 0:
                get_state_dict(model, optimizer)
            if asks:
                state = get_state_dict(model, optimizer)
                set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
            stays, rate = fingerprint(model) == before, optimizer.param_groups[0]["lr"]
            _steps(model, optimizer)
            ends.append([fingerprint(model), optimizer.compression_stats()["steps"]])
        found[f"{kind}, {way}"] = {"rate": float(rate), "stays": stays, "ends": ends}
    return found


def synchronized_again() -> dict[str, Any]:
    """``synchronize()`` with nothing new since the last step; and a second ``step()``."""
    ends, errors = [], []
    for again in (False, True):
        model = smooth_model()
        optimizer = DistributedOptimizer(_sgd(model), model.named_parameters(), FEW)
        for x, y in batches(3, dist.get_rank()):
            if again:
                optimizer.synchronize()
                optimizer.synchronize()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        ends.append(fingerprint(model))
        errors.append(error_of(optimizer.step))
        with optimizer.skip_synchronize():
            optimizer.synchronize()
            errors.append(error_of(optimizer.step))
        assert fingerprint(model) == ends[-1]
    told = sorted(session(optimizer).told)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.synchronize()
    added = error_of(lambda: F.mse_loss(model(x), y).backward())
    return {"ends": ends, "errors": errors, "told": told, "added": added}


def clipped_doubles() -> dict[str, Any]:
    """A model in float64, some of it or all, that the script clips, or ``clip_norm``: as the same model in fp32."""
    found: dict[str, Any] = {}
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for how, plain in itertools.product(("norm", "largest", "elements", "clip_norm"), (False, True)):
        ends = []
        for dtype in dtypes:
            inner = smooth_model().to(dtype)
            model: Any = inner if plain else DistributedDataParallel(inner)
            compression = Compression.dgc(0.1, min_numel=64, clip_norm=0.5 if how == "clip_norm" else None)
            optimizer = _sgd(model)
            if plain:
                DistributedOptimizer(optimizer, model.named_parameters(), compression)
            else:
                register(model, optimizer, compression)
            for x, y in batches(4, dist.get_rank()):
                optimizer.zero_grad()
                F.mse_loss(model(x.to(dtype)).double(), y.double()).backward()
                optimizer.synchronize()
                _clip(how, model)
                with optimizer.skip_synchronize():
                    optimizer.step()
            ends.append(weights(model).double())
            found[f"{how}, {plain=}, {dtype}"] = distance(ends[0], ends[-1]), float(ends[-1].sum())
    return found


def _clip(how: str, model: nn.Module) -> None:
    if how in ("norm", "largest"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.2, 2.0 if how == "norm" else torch.inf)
    elif how == "elements":
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
