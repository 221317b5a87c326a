"""What cannot be compressed is refused when it is wrapped, on every rank alike; what is only odd works.

And what scripts do to a model, its gradients and its optimizer afterwards: as in stock Horovod, or told in words.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import _set_fsdp_flattened
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import batches, distance, fingerprint, smooth_model, step, weights
from tests.helpers.run import EVERYTHING
from tests.helpers.training import first_loss, made, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FEW = Compression.dgc(0.1)


def _wrapped(model: nn.Module, make: Callable[..., Any] = torch.optim.SGD, groups: Any = None, **options: Any) -> Any:
    optimizer = make(model.parameters(), **{"lr": 0.05, **options})
    compression = Compression.dgc(0.1, min_numel=16)
    return DistributedOptimizer(optimizer, model.named_parameters(), compression, groups=groups)


def _with(p: torch.Tensor, requires_grad: bool = True) -> nn.Module:
    """A model with one more parameter."""
    model = smooth_model()
    model.extra = nn.Parameter(p, requires_grad)
    return model


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
    first_loss(model).backward()
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
        "'extra' is of torch.complex64", lambda: _wrapped(_with(torch.zeros(4, dtype=torch.complex64)))),
    "float8": (
        "'extra' is of torch.float8_e5m2", lambda: _wrapped(_with(torch.zeros(4).to(torch.float8_e5m2)))),
    "sparse layout": (
        "'extra' has the layout torch.sparse_coo", lambda: _wrapped(_with(torch.eye(4).to_sparse()))),
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
    first_loss(model).backward()
    for part in parts:
        part.step()
    assert error_of(whole.step)
    same_on_ranks(fingerprint(model))


def test_horovods_own_operations_in_the_middle_of_a_step():
    """They change nothing, and give what they should."""
    ends, own = [], torch.full((2,), float(hvd.rank()))
    for others in (False, True):
        model = smooth_model()
        optimizer = _wrapped(model, momentum=0.9)
        for x, y in batches(4, hvd.rank()):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
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


OTHER_GRADIENT = "UnsupportedUse: the gradient of '"


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_of_another_size_are_refused(clip_norm):
    """Parameters are cut to a part: kernels had written beyond their memory."""
    model, optimizer = made(Compression.dgc(0.1, clip_norm=clip_norm))
    train(model, optimizer, 2)
    layer = model[4]
    layer.weight.data, layer.bias.data = layer.weight.data[:8].clone(), layer.bias.data[:8].clone()
    model[6].weight.data = model[6].weight.data[:, :8].clone()
    error = error_of(lambda: train(model, optimizer, 1))
    assert error.startswith(OTHER_GRADIENT) and "as when the optimizer was wrapped" in error and "complex" not in error


def _trained_in(dtype: torch.dtype, model: Any, optimizer: Any) -> torch.Tensor:
    """Weights of a model that is cast before its first step."""
    model.to(dtype)
    for x, y in batches(4, hvd.rank()):
        step(model, optimizer, x.to(dtype), y.to(dtype))
    state = [x for entries in optimizer.state.values() for x in entries.values() if x is not None and x.ndim]
    assert {x.dtype for x in state} <= {dtype}
    return weights(model.float())


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_model_that_is_cast_after_wrapping_trains_as_with_stock_horovod(kind):
    """Adam's zeros had stayed in the dtype of wrapping, so its first step failed; stock takes float64 alone."""

    def make(model: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, **{"momentum": 0.9} if kind == "SGD" else {})

    stock = _trained_in(torch.float64, *made(None, make))
    topk, dgc = Compression.topk(1.0, **EVERYTHING), Compression.dgc(1.0, **EVERYTHING)
    for compression in (topk, dgc, Compression.local(steps=2)):
        for dtype in (torch.float64, torch.bfloat16):
            model, optimizer = made(compression, make)
            end = _trained_in(dtype, model, optimizer)
            same_on_ranks(fingerprint(model))
            assert compression is not topk or dtype is not torch.float64 or distance(stock, end) < 1e-5


def test_gradients_that_a_script_sets_itself_are_new_ones():
    """With as many writes in place as the applied ones they had been taken for those: a false error.

    A script computes gradients, cuts them in place, on some ranks alone, and puts them into p.grad: no backward pass.
    """
    ends = []
    for compression in (None, Compression.dgc(1.0, **EVERYTHING)):
        model, optimizer = made(compression)
        for number, (x, y) in enumerate(batches(6, hvd.rank())):
            if number == 4:
                model.zero_grad()  # the memory of the old ones may become that of the new ones
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.mul_(0.5) if number % 2 or (hvd.rank() and number == 2) else gradient
            optimizer.step()
        ends.append(weights(model))
    assert distance(*ends) < 1e-5
    assert "step() was called again with no backward pass" in error_of(optimizer.step)


def test_what_is_dropped_goes_at_once():
    """u, v and gradients had waited for Python's collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer = made(FEW)
        train(model, optimizer, 2)
        left = [weakref.ref(each) for each in (session(optimizer).exchange, *session(optimizer).exchange.engines)]
        del optimizer
        assert not any(each() is not None for each in left)
    finally:
        gc.enable()


def test_a_commit_within_an_accumulation():
    """``TorchState.commit()`` and ``restore()`` after the first of two backward passes had ended the job."""
    model, optimizer = made(FEW, backward_passes_per_step=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
    train(model, optimizer, 3, passes=2)
    before, steps = fingerprint(model), session(optimizer).exchange.steps
    first_loss(model).backward()
    state.save()
    first_loss(model).backward()
    assert "between two steps only" in error_of(state.save)  # gradients are being exchanged
    optimizer.step()
    optimizer.zero_grad()
    first_loss(model).backward()
    state.restore()
    assert (fingerprint(model), session(optimizer).exchange.steps) == (before, steps)
    optimizer.zero_grad()
    train(model, optimizer, 2, passes=2)
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize("compression", [Compression.topk(0.1), Compression.local(steps=2)], ids=["topk", "local"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Adam", {"lr": 0.01, "amsgrad": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
    ],
    ids=["amsgrad", "dampening", "no momentum"],
)
def test_a_state_that_rank_0_alone_has_loaded_reaches_all(kind, options, compression):
    """Empty entries had made Horovod broadcast other tensors on each rank."""

    def make(model: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters(), **options)

    model = smooth_model()
    plain = make(model)
    step(model, plain, *next(iter(batches(1, 0))))
    plain.param_groups[0]["lr"] = 0.05
    saved = copy.deepcopy(plain.state_dict())
    model, optimizer = made(compression, make)
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
    before = fingerprint(model)
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state_dict()["state"]
    assert fingerprint(model) == before and optimizer.param_groups[0]["lr"] == 0.05
    if compression.config.local_steps is None:
        assert kind != "Adam" or "max_exp_avg_sq" in state[0]
        assert "momentum" in options or kind == "Adam" or state == {}
    same_on_ranks({i: {key: float(x.sum()) for key, x in entries.items()} for i, entries in state.items()})
    train(model, optimizer, 2)
    same_on_ranks(fingerprint(model))


def test_parts_of_a_model_have_directories_of_their_own(tmp_path):
    """The second optimizer had replaced the checkpoint of the first."""
    model = smooth_model()
    named = list(model.named_parameters())
    halves = [torch.optim.SGD([p for _, p in part], 0.1, 0.9) for part in (named[:4], named[4:])]
    first, second = (DistributedOptimizer(half, named, FEW) for half in halves)
    for x, y in batches(2, hvd.rank()):
        F.mse_loss(model(x), y).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    save_checkpoint(tmp_path, model, first)
    save_checkpoint(tmp_path, model, first)
    error = error_of(lambda: save_checkpoint(tmp_path, model, second))
    assert error.startswith("CheckpointError: ") and "the checkpoint of another optimizer" in error
    same_on_ranks(error.split("failed; ")[1])
    load_checkpoint(tmp_path, model, first)


def test_a_group_that_is_added_to_the_inner_optimizer_is_refused():
    model = smooth_model()
    named = list(model.named_parameters())
    inner = torch.optim.SGD([p for _, p in named[:4]], 0.1)
    optimizer = DistributedOptimizer(inner, named[:4], FEW)
    inner.add_param_group({"params": [p for _, p in named[4:]]})
    first_loss(model).backward()
    assert error_of(optimizer.step).startswith("UnsupportedUse: a parameter of shape (32, 64) was added")


def test_epochs_become_whole_numbers():
    """2.0 had been saved and then refused; an integer of NumPy could not be saved."""
    model, optimizer = made(Compression.dgc(0.1, warmup=WarmupSchedule(epochs=3)))
    sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=hvd.size(), rank=hvd.rank())
    for epoch, kept in ((1, "1"), (2.0, "2"), (np.int64(2), "2"), (np.float32(1.0), "1")):
        for tell in (optimizer.set_epoch, sampler.set_epoch):
            tell(epoch)
            assert repr(session(optimizer).exchange.epoch) == kept
    train(model, optimizer, 1)
    optimizer.load_residual_state_dict(optimizer.residual_state_dict())
    for epoch in (1.5, "2", None):
        assert error_of(lambda epoch=epoch: optimizer.set_epoch(epoch)).split(", got ")[1] == repr(epoch)
