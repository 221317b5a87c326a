"""Ranks with different numbers of batches: those that have finished are in join() while the others go on."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression
from tests.helpers.bound_before import join as bound_before
from tests.helpers.errors import error_of
from tests.helpers.local_training import H, adamw
from tests.helpers.local_training import made as made_local
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, nesterov, smooth_model, step, weights
from tests.helpers.run import EVERYTHING
from tests.helpers.training import first_loss, made, momentum_sgd, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(3, late=True)]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3, weight_decay=1e-3)


def _dgc(make: Make = momentum_sgd, density: float = 0.05, wrap: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Model and optimizer."""
    return made(Compression.dgc(density, **{"min_numel": 16, "check_every": 1, **fields}), make, **(wrap or {}))


def _own_steps() -> int:
    """The highest rank but one has most batches."""
    return {hvd.size() - 2: 9, hvd.size() - 1: 7}.get(hvd.rank(), 4)


@pytest.mark.parametrize("make", [momentum_sgd, nesterov])
def test_uneven_data_give_what_stock_horovod_gives(make):
    """At density 1 it is stock's join, followed by the broadcasts that stock leaves to the script."""
    stock, reference = made(None, make)
    train(stock, reference, _own_steps())
    last = hvd.join()
    hvd.broadcast_parameters(stock.state_dict(), last)
    hvd.broadcast_optimizer_state(reference, last)
    ours, optimizer = _dgc(make, 1.0, **EVERYTHING)
    train(ours, optimizer, _own_steps())
    assert hvd.join() == last == 1
    assert distance(weights(stock), weights(ours)) < 1e-6
    train(stock, reference, 3)
    train(ours, optimizer, 3)
    assert distance(weights(stock), weights(ours)) < 1e-6
    same_on_ranks(fingerprint(ours))


@pytest.mark.parametrize("make", [nesterov, _adam])
def test_a_join_of_all_at_once_changes_nothing(make):
    """All join after the same step: training goes on as if nobody had, to the last bit."""
    ends = []
    for joins in (False, True):
        model, optimizer = _dgc(make)
        if joins:
            hvd.join()  # before the first step too
        train(model, optimizer, 5)
        before = [p.grad for p in model.parameters()]
        assert not joins or hvd.join() == hvd.size() - 1
        assert all(p.grad is was for p, was in zip(model.parameters(), before, strict=True))
        train(model, optimizer, 5)
        stats = optimizer.compression_stats()
        ends.append([fingerprint(model), stats["steps"], stats["selected"]])
        del optimizer
    assert ends[0] == ends[1]


@pytest.mark.parametrize("make", [nesterov, _adam])
def test_those_who_came_early_become_as_the_last_one(make):
    """A scheduler counts batches, so those who join early have another rate; their weights become the last one's."""
    model, optimizer = _dgc(make, on_mismatch="stop")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for _ in range(2):  # epochs
        train(model, optimizer, _own_steps(), after_step=lambda step: scheduler.step())
        last = hvd.join()
        scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), last))
    assert optimizer.compression_stats()["steps"] == 18
    same_on_ranks(fingerprint(model), optimizer.param_groups[0]["lr"])


def test_two_optimizers_in_any_order():
    """One is stepped twice as often as the other: nobody tells those in join which one comes next."""
    (first, often), (second, seldom) = _dgc(), _dgc(_adam)
    for number in range(_own_steps()):
        train(first, often, 1)
        if number % 2:
            train(second, seldom, 1)
    assert hvd.join() == 1
    assert [optimizer.compression_stats()["steps"] for optimizer in (often, seldom)] == [9, 4]
    same_on_ranks(fingerprint(first), fingerprint(second))


def test_an_optimizer_that_is_garbage_on_some_ranks_takes_no_part():
    """It is gone on the first rank, and still in memory on the others."""
    gc.disable()
    try:
        _, dropped = _dgc()
        dropped.itself = dropped
        del dropped
        if hvd.rank() == 0:
            gc.collect()
        model, optimizer = _dgc()
        train(model, optimizer, _own_steps())
        assert hvd.join() == 1
    finally:
        gc.enable()
    same_on_ranks(fingerprint(model))


def test_a_step_that_is_not_finite_is_skipped_in_join_as_well():
    """A step of those who still have data."""
    model, optimizer = _dgc()
    for number, (x, y) in enumerate(batches(_own_steps(), hvd.rank())):
        step(model, optimizer, x * float("nan") if number == 6 else x, y)
    assert hvd.join() == 1
    train(model, optimizer, 2)
    assert weights(model).isfinite().all()
    same_on_ranks(fingerprint(model))


def test_a_backward_pass_that_makes_no_whole_step_stays_for_the_next_one():
    model, optimizer = _dgc(wrap={"backward_passes_per_step": 2})
    train(model, optimizer, _own_steps(), passes=2)
    optimizer.zero_grad()
    first_loss(model).backward()
    before = [p.grad.clone() for p in model.parameters()]
    hvd.join()
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))
    first_loss(model).backward()
    optimizer.step()
    same_on_ranks(fingerprint(model))


def test_loss_scales_are_shared():
    """One grows while others are in join."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    model, optimizer = _dgc(wrap={"grad_scaler": scaler})
    for _ in range(2):
        for x, y in batches(_own_steps(), hvd.rank()):
            step(model, optimizer, x, y, scaler, between=lambda: None)
        hvd.join()
    assert scaler.get_scale() > 8
    same_on_ranks(fingerprint(model), scaler.get_scale())


def _nothing_compressed() -> None:
    _pair = made(Compression.dgc(0.1, dense_values="fp32"), inner=nn.Linear(2, 2))
    hvd.join()


def _bound_before() -> None:
    _pair = _dgc()
    bound_before()


def _between() -> None:
    model, optimizer = _dgc()
    first_loss(model).backward()
    try:
        hvd.join()
    finally:
        optimizer.step()


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (_nothing_compressed, "UnsupportedUse: .*dgcrun: --compression none"),
        (_bound_before, r"DGCError: .*Call hvd.join\(\)"),
        (_between, r"between backward\(\) and step\(\)"),
    ],
)
def test_what_is_refused(attempt, words):
    """In words, on every rank; then stock's own join works again."""
    error = error_of(attempt)
    assert re.search(words, error), error
    hvd.barrier()
    assert hvd.join() in (0, 1, 2)


def test_an_optimizer_of_some_of_the_ranks_is_refused():
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if pair.included():
        _model, _optimizer = _dgc(wrap={"process_set": pair})
        assert "an optimizer of some of them" in error_of(hvd.join)
    hvd.barrier()


@pytest.mark.on_ranks(3, last=2)
def test_another_exchange_meanwhile_is_an_error_not_a_hang():
    """One rank waits in join while another averages a metric."""
    model, optimizer = _dgc()
    train(model, optimizer, 3)
    start = time.monotonic()
    if hvd.rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DGC_TIMEOUT", "2")
            error = error_of(hvd.join)
        assert re.match(r"CollectiveTimeout: rank 0 of 3 waited 2 s in join\(\)", error)
    hvd.allreduce(torch.zeros(1), name="metric")
    assert time.monotonic() - start < 20


LOCAL_STEPS = [H + 2, 3 * H, 2 * H + 1]  # of each rank; rank 0 ends within a round, rank 1 right after an exchange


def test_every_exchange_is_the_mean_of_all_ranks_weights_of_local_steps():
    """At density 1; some have changed less, or nothing any more."""
    model, optimizer = made_local(outer_momentum=0.0, density=1.0, local_decay=1.0, **UNROUNDED)
    own = LOCAL_STEPS[hvd.rank()]
    train(model, optimizer, own)
    assert hvd.join() == 1
    assert distance(_means_of_all(), weights(model)) <= 1e-5
    assert int(optimizer.state[next(model.parameters())]["step"]) == own
    assert session(optimizer).exchange.steps == 4, "three full rounds, and the end of join"
    train(model, optimizer, H)
    assert session(optimizer).exchange.counts.pending == 0
    same_on_ranks(fingerprint(model))


def _means_of_all() -> torch.Tensor:
    """What the ranks come to, all of them in this process."""
    models = [smooth_model() for _ in LOCAL_STEPS]
    inner, data = [adamw(model) for model in models], [iter(batches(own, i)) for i, own in enumerate(LOCAL_STEPS)]
    for begun in range(0, max(LOCAL_STEPS), H):
        for model, optimizer, own, mine in zip(models, inner, LOCAL_STEPS, data, strict=True):
            for _ in range(min(H, max(0, own - begun))):
                x, y = next(mine)
                step(model, optimizer, x, y)
        mean = torch.stack([weights(model) for model in models]).mean(0)
        for model in models:
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return mean


def test_epochs_schedules_and_an_exchange_of_local_steps_that_is_not_finite():
    """Two epochs at 10% with momentum; in each, not finite changes while ranks are in join."""
    model, optimizer = made_local(outer_momentum=0.5, check_every=1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    def spoil(step: int) -> None:
        if hvd.rank() == 1 and step == 3 * H - 1:
            model[0].weight.data[0, 0] = float("nan")

    for _ in range(2):
        own = LOCAL_STEPS[hvd.rank()]
        train(model, optimizer, own, after_step=lambda _: scheduler.step(), before_backward=spoil)
        optimizer.zero_grad()
        first_loss(model).backward()
        before = [p.grad for p in model.parameters()]
        last = hvd.join()
        assert last == 1 and all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
        scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), last))
        same_on_ranks(fingerprint(model), optimizer.param_groups[0]["lr"])
    assert weights(model).isfinite().all() and optimizer.compression_stats()["skipped"] == 2


def test_beside_an_optimizer_that_exchanges_at_each_step():
    (first, rounds), (second, each) = made_local(), _dgc()
    for _ in range(LOCAL_STEPS[hvd.rank()]):
        train(first, rounds, 1)
        train(second, each, 1)
    assert hvd.join() == 1
    assert [optimizer.compression_stats()["steps"] for optimizer in (rounds, each)] == [4, 15]
    same_on_ranks(fingerprint(first), fingerprint(second))


def test_a_join_of_all_at_once_is_an_exchange_of_local_steps():
    ends = []
    for joins in (False, True):
        model, optimizer = made_local()
        train(model, optimizer, H + 2)
        if joins:
            hvd.join()
        else:
            optimizer.exchange()
        train(model, optimizer, H)
        ends.append([fingerprint(model), optimizer.compression_stats()["steps"]])
        del optimizer
    assert ends[0] == ends[1]
