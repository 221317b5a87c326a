"""At density 1, masking off, values fp32: stock Horovod to 1e-5, for every argument. And not by accident."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.together import call_each
from tests.helpers.training import UNROUNDED, batches, distance, smooth_model, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_number_of_ranks = pytest.mark.usefixtures("workers")
SAME = 1e-5
Wrap = Callable[[torch.optim.Optimizer, nn.Module], Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def workers(request):
    return request.param


def _everything(**fields: Any) -> Any:
    """The compression that loses nothing: density 1, no masking, fp32."""
    return Compression.dgc(1.0, factor_masking=False, min_numel=1, **{**UNROUNDED, **fields})


def _ours(compression: Any = None, **arguments: Any) -> Wrap:
    compression = compression or _everything()
    return lambda optimizer, model: DistributedOptimizer(optimizer, model.named_parameters(), compression, **arguments)


def _stock(**arguments: Any) -> Wrap:
    return lambda optimizer, model: hvd.DistributedOptimizer(optimizer, model.named_parameters(), **arguments)


def _sgd(**options: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": list(model[:2].parameters()), "momentum": 0.5, "nesterov": False},
        {"params": list(model[2:].parameters()), "weight_decay": 1e-2, "lr": 0.02},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def _compare(
    make: Make,
    ours: Wrap | None = None,
    stock: Wrap | None = None,
    after: Callable[[Any], Callable[[int], None]] = lambda optimizer: lambda step: None,
    passes: int = 1,
) -> float:
    """Distance of the weights after 20 steps."""
    ends = []
    for wrap in (stock or _stock(), ours or _ours()):
        model = smooth_model()
        optimizer = wrap(make(model), model)
        train(model, optimizer, 20, passes, after_step=after(optimizer))
        ends.append(weights(model))
    return distance(*ends)


def _momentum_by_schedule(optimizer: Any) -> Callable[[int], None]:
    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.5 + 0.02 * step

    return change


def _one_cycle(optimizer: Any) -> Callable[[int], None]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=25)
    return lambda step: scheduler.step()


OPTIONS: dict[str, Callable[[], float]] = {
    "plain": lambda: _compare(_sgd(momentum=0)),
    "momentum": lambda: _compare(_sgd()),
    "nesterov": lambda: _compare(_sgd(nesterov=True)),
    "weight decay": lambda: _compare(_sgd(weight_decay=1e-2)),
    "nesterov, weight decay": lambda: _compare(_sgd(nesterov=True, weight_decay=1e-2)),
    "maximize": lambda: _compare(_sgd(maximize=True, lr=1e-3, weight_decay=1e-2)),
    "foreach": lambda: _compare(_sgd(foreach=True, nesterov=True)),
    "two groups": lambda: _compare(_two_groups),
    "momentum by schedule": lambda: _compare(_sgd(), after=_momentum_by_schedule),
    "OneCycleLR": lambda: _compare(_sgd(), after=_one_cycle),
    "1-D too": lambda: _compare(_sgd(), _ours(_everything(compress_1d=True, bucket_bytes=4096))),
    "compression none": lambda: _compare(_sgd(), _ours(Compression.none)),
    "topk preset": lambda: _compare(_sgd(weight_decay=1e-2), _ours(Compression.topk(1.0, **UNROUNDED))),
}


@each_number_of_ranks
@pytest.mark.parametrize("option", OPTIONS)
def test_every_sgd_option(option):
    assert OPTIONS[option]() <= SAME


@each_number_of_ranks
def test_compression_fp16():
    ours, stock = _ours(Compression.fp16), _stock(compression=hvd.Compression.fp16)
    # Horovod's ring adds fp16 in an order that depends on what it fused, so stock differs from itself too
    assert 0 <= _compare(_sgd(), ours, stock) < 2e-3


@each_number_of_ranks
def test_what_differs_is_seen_to_differ():
    assert _compare(_sgd(), _ours(Compression.dgc(0.01))) > 1e-3, "a compressed run equals a dense one"
    assert _compare(_sgd(lr=0.02), stock=_stock(op=hvd.Sum)) > 1e-3, "a sum equals a mean"


@each_number_of_ranks
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"backward_passes_per_step": 3}, {}),
        ({"op": hvd.Sum}, {"lr": 0.02}),
        ({"gradient_predivide_factor": 2.0}, {}),
        ({"num_groups": 2}, {}),
        ({"groups": 3}, {}),
    ],
    ids=str,
)
def test_every_argument_of_the_signature(arguments, options):
    passes = arguments.get("backward_passes_per_step", 1)
    assert _compare(_sgd(**options), _ours(**arguments), _stock(**arguments), passes=passes) <= SAME


@each_number_of_ranks
def test_groups_of_parameters():
    def grouped(wrap: Callable[..., Wrap]) -> Wrap:
        return lambda optimizer, model: wrap(groups=[list(model[4:].parameters())])(optimizer, model)

    assert _compare(_sgd(), grouped(_ours), grouped(_stock)) <= SAME


@each_number_of_ranks
def test_parameter_frozen_half_way():
    """After step 10: as stock."""
    ends = []
    for wrap in (_stock(), _ours()):
        model = smooth_model()
        optimizer = wrap(_sgd()(model), model)
        train(model, optimizer, 20, before_backward=lambda step, m=model: m[0].weight.requires_grad_(step < 10))
        ends.append(weights(model))
    assert distance(*ends) <= SAME


@each_number_of_ranks
def test_the_residual_of_a_parameter_frozen_half_way_drains():
    model = smooth_model()
    optimizer = _ours(Compression.dgc(0.05, scope="tensor", min_numel=1))(_sgd(lr=1e-3)(model), model)
    norms = {}

    def look(step: int) -> None:
        arrays = optimizer.residual_state_dict()["tensors"]["0.weight"]
        # on nodes a rank may have no slice of a tensor, and no u
        norms[step] = sum(float((arrays[part] ** 2).sum()) for part in ("v", "u") if part in arrays)

    train(model, optimizer, 80, after_step=look, before_backward=lambda step: model[0].weight.requires_grad_(step < 10))
    before, after = (sum(hvd.allgather_object(norms[step])) for step in (9, 79))
    assert after < 1e-3 * before, "momentum and residual do not drain"


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@each_number_of_ranks
def test_adam_at_density_1_is_stock():
    assert _compare(_adamw) <= SAME


@each_number_of_ranks
@pytest.mark.parametrize("way", ["loaded", "wrapped"])
@pytest.mark.parametrize("options", [{"weight_decay": 1e-2, "nesterov": True}, {}], ids=["decay", "no decay"])
def test_stock_checkpoints_are_taken_over(options, way):
    """Ten steps of stock Horovod, then ten more from its state: with stock, with ours loaded, with ours wrapped."""
    make, model = _sgd(**options), smooth_model()
    optimizer = _stock()(make(model), model)
    train(model, optimizer, 10)
    again = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 10)
    own = make(again)
    if way == "wrapped":
        own.load_state_dict(state)
    resumed = _ours()(own, again)
    if way == "loaded":
        resumed.load_state_dict(state)
    train(again, resumed, 10)
    assert distance(weights(model), weights(again)) <= SAME


@each_number_of_ranks
def test_a_stock_checkpoint_of_adam_is_taken_over():
    """One rank's state, loaded: the engine takes over moments and step count."""
    model = smooth_model()
    adam = _adamw(model)
    same_data = list(batches(20, rank=0))

    def steps(model: nn.Module, optimizer: Any, data: list[Any]) -> None:
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    steps(model, adam, same_data[:10])
    again = copy.deepcopy(model)
    resumed = _ours()(_adamw(again), again)
    resumed.load_state_dict(copy.deepcopy(adam.state_dict()))
    steps(model, adam, same_data[10:])
    steps(again, resumed, same_data[10:])
    assert distance(weights(model), weights(again)) <= SAME


def _with_sparse_gradients(wrap: Wrap) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(200, 16, sparse=True, mode="sum"), nn.Linear(16, 1))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randint(0, 200, (8, 5), generator=generator)).pow(2).mean().backward()
        optimizer.step()
    return weights(model)


@each_number_of_ranks
def test_sparse_gradients():
    """``sparse_as_dense=True`` is compressed and equals stock; without it a clear error."""
    assert "sparse_as_dense=True" in error_of(lambda: _with_sparse_gradients(_ours()))
    stock, ours = (_with_sparse_gradients(wrap(sparse_as_dense=True)) for wrap in (_stock, _ours))
    assert distance(stock, ours) <= SAME


ALL = [
    test_every_sgd_option,
    test_compression_fp16,
    test_what_differs_is_seen_to_differ,
    test_every_argument_of_the_signature,
    test_groups_of_parameters,
    test_parameter_frozen_half_way,
    test_the_residual_of_a_parameter_frozen_half_way_drains,
    test_adam_at_density_1_is_stock,
    test_stock_checkpoints_are_taken_over,
    test_a_stock_checkpoint_of_adam_is_taken_over,
    test_sparse_gradients,
]


@pytest.mark.slow
@pytest.mark.on_ranks(4, nodes=2)
def test_all_on_nodes():
    call_each(*ALL)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(2, controller="mpi")
def test_all_over_mpi():
    call_each(*ALL)
