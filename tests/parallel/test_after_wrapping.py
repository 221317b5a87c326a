"""What scripts do to a model, its gradients and its optimizer after wrapping: as in stock Horovod, or told in words."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule, load_checkpoint, save_checkpoint
from tests.helpers.errors import error_of
from tests.helpers.interrupted import made
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
ALL = {"factor_masking": False, "min_numel": 1, **UNROUNDED}
FEW = Compression.dgc(0.1)


def _loss(model: Any) -> torch.Tensor:
    x, y = next(iter(batches(1, hvd.rank())))
    return F.mse_loss(model(x), y)


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


def test_gradients_of_another_kind_are_refused():
    model, _optimizer = made(FEW)
    model.to(torch.complex64)
    x, _ = next(iter(batches(1, hvd.rank())))
    error = error_of(lambda: model(x.to(torch.complex64)).abs().sum().backward())
    assert error.startswith(OTHER_GRADIENT) and "as when the optimizer was wrapped" in error and "complex64" in error


def _trained_in(dtype: torch.dtype, model: Any, optimizer: Any) -> torch.Tensor:
    """Weights of a model that is cast before its first step."""
    model.to(dtype)
    for x, y in batches(4, hvd.rank()):
        optimizer.zero_grad()
        F.mse_loss(model(x.to(dtype)), y.to(dtype)).backward()
        optimizer.step()
    state = [x for entries in optimizer.state.values() for x in entries.values() if x is not None and x.ndim]
    assert {x.dtype for x in state} <= {dtype}
    return weights(model.float())


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_model_that_is_cast_after_wrapping_trains_as_with_stock_horovod(kind):
    """Adam's zeros had stayed in the dtype of wrapping, so its first step failed; stock takes float64 alone."""

    def make(model: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, **{"momentum": 0.9} if kind == "SGD" else {})

    model = smooth_model()
    stock = _trained_in(torch.float64, model, hvd.DistributedOptimizer(make(model), model.named_parameters()))
    topk, dgc = Compression.topk(1.0, **ALL), Compression.dgc(1.0, **ALL)
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
    for factory, compression in (
        (hvd.DistributedOptimizer, hvd.Compression.none),
        (DistributedOptimizer, Compression.dgc(1.0, **ALL)),
    ):
        model = smooth_model()
        optimizer = factory(momentum_sgd(model), model.named_parameters(), compression)
        for step, (x, y) in enumerate(batches(6, hvd.rank())):
            if step == 4:
                model.zero_grad()  # the memory of the old ones may become that of the new ones
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient.mul_(0.5) if step % 2 or (hvd.rank() and step == 2) else gradient
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
    _loss(model).backward()
    state.save()
    _loss(model).backward()
    assert "between two steps only" in error_of(state.save)  # gradients are being exchanged
    optimizer.step()
    optimizer.zero_grad()
    _loss(model).backward()
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
    x, y = next(iter(batches(1, 0)))
    F.mse_loss(model(x), y).backward()
    plain.step()
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
    assert "the checkpoint of another optimizer" in error_of(lambda: save_checkpoint(tmp_path, model, second))
    load_checkpoint(tmp_path, model, first)


def test_a_group_that_is_added_to_the_inner_optimizer_is_refused():
    model = smooth_model()
    named = list(model.named_parameters())
    inner = torch.optim.SGD([p for _, p in named[:4]], 0.1)
    optimizer = DistributedOptimizer(inner, named[:4], FEW)
    inner.add_param_group({"params": [p for _, p in named[4:]]})
    _loss(model).backward()
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
