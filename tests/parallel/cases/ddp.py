"""DDP with our hook, without Horovod: at density 1 it is stock DDP; whatever DDP can do works, or is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
from tests.helpers.errors import error_of
from tests.helpers.regression import (
    INPUTS,
    UNROUNDED,
    SharedGradients,
    batches,
    distance,
    fingerprint,
    smooth_model,
    weights,
)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def everything(**fields: Any) -> Any:
    """The compression that loses nothing."""
    return Compression.dgc(1.0, factor_masking=False, min_numel=1, **{**UNROUNDED, **fields})


def _sgd(**options: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    groups = [
        {"params": list(inner[:2].parameters()), "momentum": 0.5, "nesterov": False},
        {"params": list(inner[2:].parameters()), "weight_decay": 1e-2, "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def _steps(model: Any, optimizer: Any, steps: int = 12, passes: int = 1, scaler: Any = None, **autocast: Any) -> None:
    """Train; backward passes of a step but the last are under no_sync."""
    data = iter(batches(steps * passes, dist.get_rank()))
    for _ in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            x, y = next(data)
            with model.no_sync() if i < passes - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", **autocast) if autocast else contextlib.nullcontext():
                    loss = F.mse_loss(model(x).float(), y) / passes
                (scaler.scale(loss) if scaler is not None else loss).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def _trained(make: Make, compression: Any, model: nn.Module | None = None, **options: Any) -> torch.Tensor:
    training = {key: options.pop(key) for key in ("passes", "scaler", "dtype") if key in options}
    model = DistributedDataParallel(model or smooth_model(), **options)
    optimizer = make(model)
    if compression is not None:
        register(model, optimizer, compression)
    _steps(model, optimizer, **training)
    return weights(model)


def _compare(make: Make, compression: Any = None, **options: Any) -> float:
    stock = _trained(make, None, **{k: copy.deepcopy(v) for k, v in options.items()})
    return distance(stock, _trained(make, compression or everything(), **options))


def as_stock() -> dict[str, float]:
    """Distance from stock DDP after 12 steps."""
    sgd = _sgd(nesterov=True, weight_decay=1e-2)
    return {
        "nesterov, weight decay": _compare(sgd),
        "two groups": _compare(_two_groups),
        "no_sync": _compare(sgd, passes=3),
        "two groups, no_sync": _compare(_two_groups, passes=2),
        "small buckets of DDP": _compare(sgd, bucket_cap_mb=0.005),
        "gradient_as_bucket_view": _compare(sgd, gradient_as_bucket_view=True, bucket_cap_mb=0.01),
        "static_graph": _compare(sgd, static_graph=True),
        "small buckets of ours": _compare(sgd, everything(bucket_bytes=4096)),
        "AdamW": _compare(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3)),
        "topk": _compare(sgd, Compression.topk(1.0, **UNROUNDED)),
        "sharded": _compare(sgd, everything(exchange="sharded")),
        "bf16 autocast": _compare(sgd, dtype=torch.bfloat16),
        "fp16 hook": _compare(sgd, Compression.fp16) / 200,
        "wrong on purpose": _compare(sgd, Compression.dgc(0.01)),
    }


class _Branches(nn.Module):
    """A part that some ranks leave out in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.left, self.right = nn.Linear(INPUTS, 48), nn.Linear(48, 48), nn.Linear(48, 48)
        self.head, self.step = nn.Linear(48, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        x = torch.tanh(self.body(x))
        side = self.left if (self.step + dist.get_rank()) % 2 else self.right
        return self.head(torch.tanh(side(x)))


def unused() -> dict[str, float]:
    """Each step one rank leaves out one part, and the other rank the other."""
    sgd = _sgd(nesterov=True, weight_decay=1e-2)
    return {
        f"find_unused_parameters, {view=}": _compare(
            sgd, model=_Branches(), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        for view in (False, True)
    }


def scaler() -> dict[str, Any]:
    """With a GradScaler as stock; a gradient of one rank that is not finite makes every rank skip that step."""
    sgd = _sgd(nesterov=True, lr=0.02)
    found: dict[str, Any] = {"distance": _compare(sgd, scaler=torch.amp.GradScaler("cpu", 1024.0, growth_interval=4))}
    found["scale"] = []
    for compression in (None, Compression.dgc(0.1)):
        model, before = DistributedDataParallel(smooth_model()), torch.zeros(0)
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", 1024.0, growth_interval=4)
        if compression is not None:
            register(model, optimizer, compression)
        for step, (x, y) in enumerate(batches(10, dist.get_rank())):
            optimizer.zero_grad()
            before = weights(model) if step == 5 else before
            bad = step == 5 and dist.get_rank() == 1
            scaler.scale(F.mse_loss(model(x * torch.inf if bad else x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if step == 5:
                found["skipped"] = torch.equal(before, weights(model))
        found["scale"].append(scaler.get_scale())
        found["weights"] = fingerprint(model)
    return found


def compiled() -> dict[str, float]:
    """torch.compile around DDP, inside of it, of ``optimizer.step()``, and of a whole step, with DDP or without."""
    found = {}
    sgd = _sgd(nesterov=True)
    stock = _trained(sgd, None)
    for name in ("around", "inside"):
        inner = smooth_model()
        ddp = DistributedDataParallel(torch.compile(inner, backend="aot_eager") if name == "inside" else inner)
        model = torch.compile(ddp, backend="aot_eager") if name == "around" else ddp
        optimizer = register(model, sgd(ddp), everything())
        names = [session(optimizer).exchange.names[p] for p in ddp.parameters()]
        assert names == list(dict(smooth_model().named_parameters()))
        data = batches(12, dist.get_rank())
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        found[name] = distance(stock, weights(ddp))
    for name in ("step", "whole step", "whole step without DDP"):
        model = smooth_model()
        if name.endswith("DDP"):
            optimizer = DistributedOptimizer(sgd(model), model.named_parameters(), everything())
        else:
            model = DistributedDataParallel(model)
            optimizer = register(model, sgd(model), everything())
        step = torch.compile(lambda optimizer=optimizer: optimizer.step(), backend="aot_eager")

        def whole(x: torch.Tensor, y: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        compiled_whole = torch.compile(whole, backend="aot_eager")
        for x, y in batches(12, dist.get_rank()):
            if name == "step":
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                step()
            else:
                compiled_whole(x, y)
        found[name] = distance(stock, weights(model))
    return found


def replicas() -> dict[str, Any]:
    """Fingerprints of the weights of compressed runs, and what was sent."""
    found: dict[str, Any] = {}
    choices = {
        "dgc": Compression.dgc(0.02, min_numel=64),
        "dgc, tiny buckets": Compression.dgc(0.02, min_numel=64, bucket_bytes=4096),
        "topk": Compression.topk(0.02, min_numel=64),
        "gaussian": Compression.gaussian(0.02, min_numel=64),
        "sampled": Compression.sampled(0.02, min_numel=64),
        "random": Compression.random(0.02, min_numel=64),
        "threshold": Compression.threshold(0.01, min_numel=64),
        "sharded": Compression.dgc(0.02, min_numel=64, exchange="sharded", bucket_bytes=8192),
        "dense path in fp16": Compression.dgc(0.02, min_numel=64, dense_values="fp16"),
        "clipped": Compression.dgc(0.02, min_numel=64, clip_norm=0.5),
        "checked": Compression.dgc(0.02, min_numel=64, check_every=2),
    }
    for name, compression in choices.items():
        model = DistributedDataParallel(smooth_model(), bucket_cap_mb=0.01)
        optimizer = register(model, _sgd()(model), compression)
        _steps(model, optimizer, 6)
        stats = optimizer.compression_stats()
        found[name] = [fingerprint(model), stats["steps"], stats["bytes_dense"] / stats["bytes_sent"]]
    return found


def without_ddp() -> dict[str, Any]:
    """``DistributedOptimizer``: as DDP with the same gradients, also with several passes a step."""
    sgd, found = _sgd(nesterov=True, weight_decay=1e-2), {}
    for passes in (1, 3):
        model = smooth_model()
        optimizer = DistributedOptimizer(
            sgd(model), model.named_parameters(), everything(), backward_passes_per_step=passes
        )
        data = iter(batches(12 * passes, dist.get_rank()))
        for _ in range(12):
            optimizer.zero_grad()
            for _ in range(passes):
                x, y = next(data)
                (F.mse_loss(model(x), y) / passes).backward()
            optimizer.step()
        found[str(passes)] = distance(_trained(sgd, None, passes=passes), weights(model))
    return found


def schedulers_and_hooks() -> dict[str, Any]:
    """A scheduler made before ``register`` goes on counting; step hooks run once a step."""
    model = DistributedDataParallel(smooth_model())
    optimizer = _sgd()(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    register(model, optimizer, Compression.dgc(0.1))
    for x, y in batches(3, dist.get_rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return {"lr": optimizer.param_groups[0]["lr"], "hooks": len(steps), "is": isinstance(optimizer, torch.optim.SGD)}


def refusals() -> dict[str, str]:
    """What is refused, in words."""
    plain = smooth_model()
    found = {"plain model": error_of(lambda: register(plain, _sgd()(plain)))}
    for name, options in {"mixed_precision": {}, "half": {}, "more": {}, "hook": {}}.items():
        model = DistributedDataParallel(smooth_model(), **options)
        optimizer, compression = _sgd()(model), Compression.dgc(0.1)
        if name == "half":
            optimizer = torch.optim.SGD(list(model.parameters())[:2], 0.1)
        elif name == "more":
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        elif name == "hook":
            model.register_comm_hook(None, _echo)
        elif name == "mixed_precision":
            model.mixed_precision = object()
        found[name] = error_of(lambda m=model, o=optimizer, c=compression: register(m, o, c))
    model = DistributedDataParallel(smooth_model())
    found["DistributedOptimizer of DDP"] = error_of(
        lambda: DistributedOptimizer(_sgd()(model), model.named_parameters(), Compression.dgc(0.1))
    )
    sharded = fully_shard(smooth_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    found["FSDP"] = error_of(lambda: register(sharded, _sgd()(sharded)))
    found["DTensor"] = error_of(lambda: DistributedOptimizer(_sgd()(sharded), sharded.named_parameters()))
    embedding = DistributedDataParallel(nn.Embedding(9, 4, sparse=True))
    found["sparse"] = error_of(lambda: register(embedding, _sgd(momentum=0)(embedding)))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    found["ZeRO"] = error_of(lambda: register(model, zero, Compression.dgc(0.1)))
    averager = PeriodicModelAverager(2, process_group=dist.group.WORLD)
    found["post-local"] = error_of(lambda: register(model, PostLocalSGDOptimizer(_sgd()(model), averager)))
    stepped = smooth_model()
    _apply_optimizer_in_backward(torch.optim.SGD, stepped.parameters(), {"lr": 0.1})
    found["in backward"] = error_of(lambda: DistributedOptimizer(_sgd()(stepped), stepped.named_parameters()))
    found["inside of DDP"] = error_of(lambda: register(model.module, _sgd()(model)))
    nothing = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives to a rank that is not in the group
    found["not in the group"] = error_of(lambda: register(model, _sgd()(model), process_group=nothing))
    optimizer = register(model, _sgd()(model), Compression.dgc(0.1))
    x, y = next(iter(batches(1, dist.get_rank())))

    def backward(factor: float = 1.0) -> None:
        (factor * F.mse_loss(model(x), y)).backward()

    with model.no_sync():
        backward()
    found["no exchange"] = error_of(optimizer.step)
    backward()
    found["accumulated"] = error_of(backward)
    joined = DistributedDataParallel(smooth_model())
    register(joined, _sgd()(joined), Compression.dgc(0.1))

    def join() -> None:
        with joined.join():
            F.mse_loss(joined(x), y).backward()

    found["join"] = error_of(join)
    return found


def begun_anew() -> dict[str, Any]:
    """A model after an error of its DDP, and once it has been put into another one, as the messages say to go on."""
    x, y = next(iter(batches(1, dist.get_rank())))
    plain, found = smooth_model(), {}

    def made() -> tuple[Any, Any]:
        model = DistributedDataParallel(plain)
        return model, register(model, _sgd()(model), Compression.dgc(0.1))

    def step(model: Any, optimizer: Any, passes: int = 1) -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            F.mse_loss(model(x), y).backward()
        optimizer.step()

    model, optimizer = made()
    found["accumulated"] = error_of(lambda: step(model, optimizer, passes=2))
    model, optimizer = made()
    found["another DDP"] = error_of(lambda: step(DistributedDataParallel(plain), optimizer))
    model, optimizer = made()
    F.mse_loss(model(x), y).backward()
    optimizer.zero_grad()  # an update is given up
    step(model, optimizer)
    return {**found, "steps": optimizer.compression_stats()["steps"], "weights": fingerprint(plain)}


def registered_again() -> dict[str, Any]:
    """A second optimizer of the same model takes the gradients over; the first says so."""
    model = DistributedDataParallel(smooth_model())
    first = register(model, _sgd()(model), Compression.dgc(0.1))
    _steps(model, first, 2)
    second = register(model, _sgd()(model), Compression.dgc(0.1))
    _steps(model, second, 2)
    return {"steps": second.compression_stats()["steps"], "first": error_of(first.step)}


def _echo(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
    raise NotImplementedError


def shared_memory() -> dict[str, float]:
    """Distances from averaging by hand where two gradients share memory: plain, and in DDP."""
    ends = []
    for way in ("by hand", "plain", "in DDP"):
        model = SharedGradients()
        inner: nn.Module = DistributedDataParallel(model, find_unused_parameters=True) if way == "in DDP" else model
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        if way == "plain":
            DistributedOptimizer(optimizer, model.named_parameters(), everything())
        elif way == "in DDP":
            register(inner, optimizer, everything())  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(5):
            optimizer.zero_grad()
            inner(torch.randn(8, 32, generator=generator)).pow(2).mean().backward()
            if way == "by hand":
                for p in model.parameters():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            optimizer.step()
        ends.append(weights(model))
    return {"plain": distance(ends[0], ends[1]), "in DDP": distance(ends[0], ends[2])}


def step_of_before() -> str:
    """The error of a step that a library has taken before the optimizer was registered."""
    model = DistributedDataParallel(smooth_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    taken = optimizer.step
    register(model, optimizer, Compression.dgc(0.05))
    _steps(model, optimizer, 2)
    x, y = next(iter(batches(1, dist.get_rank())))
    F.mse_loss(model(x), y).backward()
    before = fingerprint(model)
    error = error_of(taken)
    assert fingerprint(model) == before
    optimizer.step()
    return error


def frozen_since() -> list[float]:
    """Layers that were frozen between DDP() and register(): they stay, and the others are trained."""
    model = DistributedDataParallel(smooth_model(), find_unused_parameters=True)
    first = model.module[0].weight
    first.requires_grad_(False)
    before = [first.detach().clone(), model.module[2].weight.detach().clone()]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, 0.9)
    register(model, optimizer, Compression.dgc(0.05))
    _steps(model, optimizer, 4)
    return [float((a - b).abs().max()) for a, b in zip(before, (first, model.module[2].weight), strict=True)]
