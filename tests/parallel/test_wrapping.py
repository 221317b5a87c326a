"""What cannot be compressed is refused when it is wrapped, on every rank alike; what is only odd works."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import batches, fingerprint, smooth_model, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def _wrapped(model: nn.Module, make: Callable[..., Any] = torch.optim.SGD, groups: Any = None, **options: Any) -> Any:
    optimizer = make(model.parameters(), **{"lr": 0.05, **options})
    compression = Compression.dgc(0.1, min_numel=16)
    return DistributedOptimizer(optimizer, model.named_parameters(), compression, groups=groups)


def _with(p: torch.Tensor, requires_grad: bool = True) -> nn.Module:
    """A model with one more parameter."""
    model = smooth_model()
    model.extra = nn.Parameter(p, requires_grad)
    return model


def _backward(model: nn.Module) -> None:
    x, y = next(iter(batches(1, hvd.rank())))
    nn.functional.mse_loss(model(x), y).backward()


def _twice(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    weight, *others = parameters
    return torch.optim.SGD([weight, *others, weight], **options)


def _meta() -> nn.Module:
    return smooth_model().to("meta")


def _fsdp1() -> nn.Module:
    """As FullyShardedDataParallel, which wants a GPU, marks the parameters that it has made views of its shard."""
    model = smooth_model()
    _set_fsdp_flattened(model[0].weight)
    return model


def _data_parallel() -> Any:
    inner = smooth_model()
    wrapper = DistributedDataParallel(inner)  # alive while the optimizer is made
    return _wrapped(inner) or wrapper


def _superseded() -> None:
    model = smooth_model()
    first, second = _wrapped(model), _wrapped(model)
    _backward(model)
    try:
        first.step()
    finally:
        second.step()


@contextlib.contextmanager
def _own_process_group() -> Iterator[None]:
    """Of torch.distributed: the ranks share nothing but Horovod."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "LBFGS": (
        "LBFGS calls its closure several times.*such as SGD or AdamW",
        lambda: _wrapped(smooth_model(), torch.optim.LBFGS)),
    "SparseAdam": (
        "pass sparse_as_dense=True.*with sparse=False", lambda: _wrapped(smooth_model(), torch.optim.SparseAdam)),
    "lazy": (
        "'0.weight' has no shape yet.*call the model once",
        lambda: _wrapped(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)))),
    "meta": (r"'0.weight' is on the meta device.*model.to_empty\(device=...\)", lambda: _wrapped(_meta())),
    "FSDP2": (
        "'0.weight' is sharded over the ranks.*whole on every rank",
        lambda: _wrapped(fully_shard(smooth_model(), mesh=init_device_mesh("cpu", (1,))))),
    "FSDP": ("weight' is sharded over the ranks", lambda: _wrapped(_fsdp1())),
    "DDP": ("'0.weight' belongs to a model in DistributedDataParallel.*leave the model plain", _data_parallel),
    "complex": (
        "'extra' is complex.*view_as_real", lambda: _wrapped(_with(torch.zeros(4, dtype=torch.complex64)))),
    "float8": (
        "'extra' is of torch.float8_e5m2", lambda: _wrapped(_with(torch.zeros(4).to(torch.float8_e5m2)))),
    "sparse layout": (
        "'extra' has the layout torch.sparse_coo", lambda: _wrapped(_with(torch.eye(4).to_sparse()))),
    "twice": ("'0.weight' is 2 times in one parameter group", lambda: _wrapped(smooth_model(), _twice)),
    "superseded": ("wrapped by another one since.*step that one", _superseded),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_words(case):
    words, attempt = REFUSED[case]
    with _own_process_group():
        error = error_of(attempt)
    assert re.search(f"^UnsupportedUse: .*{words}", error, re.S), error
    same_on_ranks(error)


@pytest.mark.parametrize(("case", "words"), [("meta", "meta device"), ("groups", "ValueError")])
def test_what_one_rank_refuses_stops_all(case, words):
    last = hvd.rank() == hvd.size() - 1
    model = _meta() if case == "meta" and last else smooth_model()
    error = error_of(lambda: _wrapped(model, groups=[[1]] if case == "groups" and last else None))
    assert re.search(f"^RankMismatch: .*refused: rank 0 has nothing, rank 1 has .*{words}", error, re.S), error
    same_on_ranks(error)


def _after_data_parallel() -> nn.Module:
    inner = smooth_model()
    DistributedDataParallel(inner)  # nobody keeps it
    return inner


def _empty_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(0, 0, bias=False), *smooth_model())
    model.forward = lambda x: nn.Sequential(*list(model)[1:])(x)
    return model


def _sharing_memory() -> nn.Module:
    """Two parameters that are views of one tensor, as in an LSTM on a GPU."""
    model, whole = smooth_model(), torch.randn(96 * 32 + 96, generator=torch.Generator().manual_seed(0)) / 8
    model[0].weight.data, model[0].bias.data = whole[: 96 * 32].view(96, 32), whole[96 * 32 :]
    return model


ODD: dict[str, Callable[[], nn.Module]] = {
    "empty first": _empty_first,
    "shared memory": _sharing_memory,
    "frozen integers": lambda: _with(torch.zeros(4, dtype=torch.int8), requires_grad=False),
    "DDP gone": _after_data_parallel,
    "all frozen": lambda: smooth_model().requires_grad_(False),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_models_train_alike(case):
    with _own_process_group():
        model = ODD[case]()
        before = fingerprint(model)
        optimizer = _wrapped(model, momentum=0.9)
        if case == "all frozen":
            optimizer.step()
        else:
            train(model, optimizer, 3)
    assert (fingerprint(model) == before) == (case == "all frozen")
    same_on_ranks(fingerprint(model))


def test_parts_of_a_model_have_optimizers_of_their_own():
    model = smooth_model()
    train(model, _wrapped(model), 2)
    whole = _wrapped(model)  # alive meanwhile
    parts = [_wrapped(part) for part in (model[:2], model[2:])]
    _backward(model)
    for part in parts:
        part.step()
    assert error_of(whole.step)
    same_on_ranks(fingerprint(model))


def test_what_a_script_has_put_on_an_optimizer_before_is_not_taken_over():
    model = smooth_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.load_state_dict = partial(plain.load_state_dict)
    plain.zero_grad = partial(plain.zero_grad)
    optimizer = _wrapped(model, lambda *_, **__: plain)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)
    train(model, optimizer, 2)
    assert optimizer.param_groups[0]["lr"] == 0.5 and "zero_grad" not in vars(optimizer)
    same_on_ranks(fingerprint(model))


def test_horovods_own_operations_in_the_middle_of_a_step():
    """They change nothing, and give what they should."""
    ends, own = [], torch.full((2,), float(hvd.rank()))
    for others in (False, True):
        model = smooth_model()
        optimizer = _wrapped(model, momentum=0.9)
        for x, y in batches(4, hvd.rank()):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if others:
                results = [
                    hvd.allreduce(own, op=hvd.Sum),
                    hvd.allgather(own),
                    hvd.alltoall(own, splits=torch.tensor([1, 1], dtype=torch.int32))[0],
                    hvd.broadcast(own, 1),
                    *hvd.grouped_allreduce([own, own], op=hvd.Max),
                ]
                hvd.barrier()
                assert [float(result.sum()) for result in results] == [2, 2, 1, 2, 2, 2]
                assert hvd.broadcast_object(hvd.rank(), 1) == 1
            optimizer.step()
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
