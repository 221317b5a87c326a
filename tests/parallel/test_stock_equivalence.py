"""At density 1, masking off, values fp32: stock Horovod, or DDP alone, to 1e-5, for every argument. Not by accident."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.regression import INPUTS, adamw, distance, sgd, smooth_model, step, weights
from tests.helpers.run import UNROUNDED, everything
from tests.helpers.together import all_of, call_each

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_number_of_ranks = pytest.mark.usefixtures("workers")
on_horovod = on_adapters("Horovod")
SAME = 1e-5
nesterov = partial(sgd, nesterov=True, weight_decay=1e-2)


def _end(
    adapter: Adapter,
    compression: Any,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    passes: int = 1,
    after: Callable[[Any], Callable[[int], object]] = lambda optimizer: lambda number: None,
    dtype: torch.dtype = torch.float32,
    scaled: bool = False,
    inner: Callable[[], nn.Module] = smooth_model,
    **options: Any,
) -> torch.Tensor:
    """Weights after some steps; those of DDP have backward passes under no_sync, but for the last.

    Args:
        adapter: whose optimizer it is.
        compression: of it; None: of the framework alone.
        make: the optimizer that is wrapped.
        passes: of a step.
        after: called with the optimizer; what it returns is called after each step, with its number.
        dtype: of torch.autocast.
        scaled: whether by a GradScaler.
        inner: the model.
        options: of the factory, or of DDP.
    """
    in_ddp = adapter.name == "DDP" or (adapter.name == "without DDP" and compression is None)
    options |= {"backward_passes_per_step": passes} if passes > 1 and not in_ddp else {}
    options |= {"op": getattr(adapter.ranks, options["op"])} if "op" in options else {}
    model, optimizer = adapter.made(compression, make, inner(), **options)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=4, enabled=scaled)
    step_ended = after(optimizer)
    steps = 20 if adapter.name == "Horovod" else 12
    data = iter(adapter.batches(steps * passes))
    for number in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            x, y = next(data)
            with model.no_sync() if in_ddp and i < passes - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                    loss = F.mse_loss(model(x).float(), y) / passes
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        step_ended(number)
    return weights(model)


def _from_stock(adapter: Adapter, compression: Any = None, preset: str = "", **case: Any) -> float:
    compression = getattr(adapter.module.Compression, preset) if preset else compression or everything()
    return distance(_end(adapter, None, **case), _end(adapter, compression, **case))


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    inner: Any = getattr(model, "module", model)
    groups = [
        {"params": list(inner[:2].parameters()), "momentum": 0.5, "nesterov": False},
        {"params": list(inner[2:].parameters()), "weight_decay": 1e-2, "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def _momentum_by_schedule(optimizer: Any) -> Callable[[int], object]:
    return lambda number: [group.update(momentum=0.5 + 0.02 * number) for group in optimizer.param_groups]


def _one_cycle(optimizer: Any) -> Callable[[int], object]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=25)
    return lambda number: scheduler.step()


class _Branches(nn.Module):
    """A part that one rank leaves out in a step, and another part that the other ranks do."""

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


OF_BOTH: dict[str, dict[str, Any]] = {  # arguments of `_from_stock`
    "nesterov, weight decay": {"make": nesterov},
    "two groups": {"make": _two_groups},
    "AdamW": {"make": adamw},
    "Adam, decay in the gradient": {"make": lambda m: torch.optim.Adam(m.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1)},
    "topk": {"make": nesterov, "compression": Compression.topk(1.0, **UNROUNDED)},
    "three passes": {"make": nesterov, "passes": 3},
    "two groups, two passes": {"make": _two_groups, "passes": 2},
}
OF_HOROVOD: dict[str, dict[str, Any]] = {
    "plain": {"make": partial(sgd, momentum=0)},
    "momentum": {},
    "nesterov": {"make": partial(sgd, nesterov=True)},
    "weight decay": {"make": partial(sgd, weight_decay=1e-2)},
    "maximize": {"make": partial(sgd, maximize=True, lr=1e-3, weight_decay=1e-2)},
    "foreach": {"make": partial(sgd, foreach=True, nesterov=True)},
    "momentum by schedule": {"after": _momentum_by_schedule},
    "OneCycleLR": {"after": _one_cycle},
    "1-D too": {"compression": everything(compress_1d=True, bucket_bytes=4096)},
    "compression none": {"preset": "none"},
    "sum": {"make": partial(sgd, lr=0.02), "op": "Sum"},
    "gradient_predivide_factor": {"gradient_predivide_factor": 2.0},
    "num_groups": {"num_groups": 2},
    "groups": {"groups": 3},
}
OF_DDP: dict[str, dict[str, Any]] = {
    "small buckets of DDP": {"make": nesterov, "bucket_cap_mb": 0.005},
    "gradient_as_bucket_view": {"make": nesterov, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    "static_graph": {"make": nesterov, "static_graph": True},
    "small buckets of ours": {"make": nesterov, "compression": everything(bucket_bytes=4096)},
    "sharded": {"make": nesterov, "compression": everything(exchange="sharded")},
    "bf16 autocast": {"make": nesterov, "dtype": torch.bfloat16},
    "fp16 hook": {"make": nesterov, "preset": "fp16"},
    "GradScaler": {"make": partial(sgd, nesterov=True, lr=0.02), "scaled": True},
    "parts that some ranks leave out": {"inner": _Branches, "find_unused_parameters": True},
    "the same, gradient_as_bucket_view": {
        "inner": _Branches, "find_unused_parameters": True, "gradient_as_bucket_view": True},
}  # fmt: skip
WITHOUT_DDP: dict[str, dict[str, Any]] = {name: OF_BOTH[name] for name in ("nesterov, weight decay", "three passes")}
CASES = {"Horovod": {**OF_BOTH, **OF_HOROVOD}, "DDP": {**OF_BOTH, **OF_DDP}, "without DDP": WITHOUT_DDP}
ROUNDED = {"bf16 autocast": 5e-3, "fp16 hook": 200 * SAME}  # a difference in the last bit may round another way


@each_number_of_ranks
@pytest.mark.parametrize(("adapter", "name"), [(Adapter(who), name) for who, cases in CASES.items() for name in cases])
def test_density_1_is_the_framework_alone(adapter, name):
    assert _from_stock(adapter, **CASES[adapter.name][name]) <= ROUNDED.get(name, SAME)


@each_number_of_ranks
@on_horovod
def test_compression_fp16(adapter):
    ends, fp16 = [], adapter.ranks.Compression.fp16
    for factory, compression in ((adapter.ranks, fp16), (adapter.module, adapter.module.Compression.fp16)):
        model = smooth_model()
        adapter.train(model, factory.DistributedOptimizer(sgd(model), model.named_parameters(), compression), 20)
        ends.append(weights(model))
    # Horovod's ring adds fp16 in an order that depends on what it fused, so stock differs from itself too
    assert 0 <= distance(*ends) < 2e-3


@each_number_of_ranks
@on_adapters("Horovod", "DDP")
def test_what_differs_is_seen_to_differ(adapter):
    assert _from_stock(adapter, Compression.dgc(0.01)) > 1e-3, "a compressed run equals a dense one"
    if adapter.name == "Horovod":
        slow = partial(sgd, lr=0.02)
        ends = _end(adapter, None, slow, op="Sum"), _end(adapter, everything(), slow)
        assert distance(*ends) > 1e-3, "a sum equals a mean"


@each_number_of_ranks
@on_horovod
@pytest.mark.parametrize("way", ["groups", "frozen after step 10"])
def test_groups_of_parameters_and_one_that_is_frozen(adapter, way):
    ends = []
    for compression in (None, everything()):
        inner = smooth_model()
        groups = {"groups": [list(inner[4:].parameters())]} if way == "groups" else {}
        model, optimizer = adapter.made(compression, sgd, inner, **groups)
        for number, (x, y) in enumerate(adapter.batches(20)):
            model[0].weight.requires_grad_(way == "groups" or number < 10)
            step(model, optimizer, x, y)
        ends.append(weights(model))
    assert distance(*ends) <= SAME


@each_number_of_ranks
@on_horovod
@pytest.mark.parametrize("way", ["loaded", "wrapped"])
@pytest.mark.parametrize("make", [partial(sgd, weight_decay=1e-2, nesterov=True), sgd], ids=["decay", "no decay"])
def test_stock_checkpoints_are_taken_over(adapter, make, way):
    """Ten steps of stock Horovod, then ten more from its state: with stock, with ours loaded, with ours wrapped."""
    model, optimizer = adapter.made(None, make)
    adapter.train(model, optimizer, 10)
    again = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    adapter.train(model, optimizer, 10)

    def with_state(model: nn.Module) -> torch.optim.Optimizer:
        own = make(model)
        own.load_state_dict(state)
        return own

    _, resumed = adapter.made(everything(), with_state if way == "wrapped" else make, again)
    if way == "loaded":
        resumed.load_state_dict(state)
    adapter.train(again, resumed, 10)
    assert distance(weights(model), weights(again)) <= SAME


def _with_sparse_gradients(adapter: Adapter, compression: Any, **more: Any) -> torch.Tensor:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.EmbeddingBag(200, 16, sparse=True, mode="sum"), nn.Linear(16, 1))
    model, optimizer = adapter.made(compression, partial(sgd, momentum=0.0), inner, **more)
    generator = torch.Generator().manual_seed(adapter.rank)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randint(0, 200, (8, 5), generator=generator)).pow(2).mean().backward()
        optimizer.step()
    return weights(model)


@each_number_of_ranks
@on_horovod
def test_sparse_gradients(adapter):
    """``sparse_as_dense=True`` is compressed and equals stock; without it a clear error."""
    assert "sparse_as_dense=True" in error_of(lambda: _with_sparse_gradients(adapter, everything()))
    ends = (_with_sparse_gradients(adapter, each, sparse_as_dense=True) for each in (None, everything()))
    assert distance(*ends) <= SAME


@pytest.mark.slow
@pytest.mark.on_ranks(4, nodes=2)
def test_all_on_nodes():
    call_each(*all_of(__name__), adapter=Adapter("Horovod"))


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(2, controller="mpi")
def test_all_over_mpi():
    call_each(*all_of(__name__), adapter=Adapter("Horovod"))
