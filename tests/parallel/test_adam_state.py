"""What is known of AdamW's second moment where a state is saved, loaded, flushed and handed on."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import load_checkpoint, save_checkpoint
from dgc_horovod.torch.elastic import TorchState
from tests.helpers.adam_training import BETAS, DENSE, adamw, known, made, wrapped
from tests.helpers.errors import error_of
from tests.helpers.interrupted import handed_over
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.training import distance, fingerprint, smooth_model, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


@pytest.mark.parametrize(
    ("at", "dense"), [(DENSE // 2, DENSE), (DENSE + 5, DENSE), (13, 0)], ids=["dense", "compressed", "from the first"]
)
def test_it_goes_on_where_it_was_interrupted(at, dense):
    ends = []
    for interrupted in (False, True):
        model, optimizer = made(dense)
        train(model, optimizer, at)
        if interrupted:
            model, optimizer = handed_over(model, optimizer, lambda model: wrapped(model, dense))
        train(model, optimizer, 2 * DENSE)
        ends.append([fingerprint(model), known(optimizer)])
    assert ends[0] == ends[1]
    same_on_ranks(fingerprint(model))


def _counts(optimizer: Any) -> dict[str, list[float]]:
    """Samples and steps of each second moment."""
    return {name: values[[1, 2]].tolist() for name, values in session(optimizer).exchange.second.saved().items()}


def test_a_flush_leaves_the_second_moment_where_stock_has_it():
    model, optimizer = made()
    train(model, optimizer, 13 + 2 * DENSE)
    before = _counts(optimizer)
    square = torch.from_numpy(session(optimizer).exchange.second["0.weight"].square())
    optimizer.flush()
    stock = smooth_model()
    stock.load_state_dict(model.state_dict())
    plain = adamw(stock)
    plain.load_state_dict(optimizer.state_dict())
    theirs = plain.state[stock[0].weight]
    assert int(theirs["step"]) == 13 + 2 * DENSE
    assert distance(theirs["exp_avg_sq"].flatten() / (1 - BETAS[1] ** int(theirs["step"])), square) < 1e-6
    train(model, optimizer, 1)
    after = _counts(optimizer)
    for name, (samples, steps) in before.items():
        assert after[name][1] == steps + 1 and abs(after[name][0] - samples) <= 2


def test_a_stock_checkpoint_is_taken_over_with_its_momentum():
    """Its first moment, too, is applied in the end."""
    model = smooth_model()
    stock = hvd.DistributedOptimizer(adamw(model), named_parameters=model.named_parameters())
    train(model, stock, DENSE)
    other, optimizer = made()
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(stock.state_dict())
    p = other[0].weight
    pull = stock.state[model[0].weight]["exp_avg"] * (0.9 / 0.1)
    optimizer.zero_grad()
    (0.0 * other(torch.zeros(4, p.shape[1])).sum()).backward()
    start = p.detach().clone()
    optimizer.step()
    optimizer.flush()
    square = stock.state[model[0].weight]["exp_avg_sq"] / (1 - BETAS[1] ** DENSE)
    rows, columns = (square.mean(dim, keepdim=True).clamp(min=float(square.mean()) / 100) for dim in (1, 0))
    sought = start * (1 - 1e-5) - 1e-3 * pull / (rows * columns / square.mean()).sqrt()
    assert distance(sought, p.detach()) / distance(start, p.detach()) < 0.1
    same_on_ranks(fingerprint(other))


def test_a_state_that_one_rank_asks_for_changes_nothing():
    ends = []
    for asks in ((), (DENSE - 2, DENSE + 2, DENSE + 5)):
        model, optimizer = made(DENSE)

        def ask(step: int, optimizer: Any = optimizer, asks: tuple[int, ...] = asks) -> None:
            if hvd.rank() == 0 and step in asks:
                optimizer.state_dict()

        train(model, optimizer, 2 * DENSE, after_step=ask)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
    same_on_ranks(ends)


def test_moments_of_each_ranks_own_are_refused():
    """A record of earlier versions."""
    _, optimizer = made()
    kept = optimizer.residual_state_dict()
    v = kept["tensors"]["0.weight"]["v"]
    kept["tensors"]["0.weight"].update(first=torch.zeros_like(v), second=torch.zeros_like(v))
    error = error_of(lambda: optimizer.load_residual_state_dict(kept))
    assert error.startswith("CheckpointError") and "'0.weight'" in error and 'residuals="ignored"' in error


def test_what_was_loaded_synced_or_left_by_a_join_is_whole(tmp_path):
    """A record that was loaded and is saved again; elastic's state; then a join, and a checkpoint after it."""
    model, optimizer = made()
    train(model, optimizer, DENSE)
    kept, saved = optimizer.residual_state_dict(), optimizer.state_dict()
    once, twice = wrapped(smooth_model()), wrapped(smooth_model())
    for to in (once, twice):
        to.load_state_dict(saved)
        to.load_residual_state_dict(kept)
        kept = to.residual_state_dict()
    assert {part for parts in kept["tensors"].values() for part in parts} == {"v"}
    del once, twice, to  # a join waits for every optimizer's steps
    state = TorchState(model=model, optimizer=optimizer)
    for act in (state.sync, state.restore, state.save, state.restore):
        act()
    if hvd.rank() == 1:  # as a newcomer knows nothing
        session(optimizer).exchange.second.clear()
    state.sync()
    same_on_ranks(known(optimizer))
    train(model, optimizer, 3 + hvd.rank())
    hvd.join()
    same_on_ranks(known(optimizer))
    save_checkpoint(tmp_path, model, optimizer)
    other, resumed = made(seed=1)
    load_checkpoint(tmp_path, other, resumed)
    assert fingerprint(other) == fingerprint(model)
    assert sum(train(other, resumed, 30)) / 30 < 1.8, "it was about 5 at the start"
    same_on_ranks(fingerprint(other), known(resumed))


def save_for_others(folder: Any) -> tuple[str, str]:
    """On a rank: weights, and what is known."""
    model, optimizer = made()
    train(model, optimizer, DENSE)
    save_checkpoint(folder, model, optimizer)
    return fingerprint(model), known(optimizer)


def load_of_others(folder: Any) -> tuple[str, str]:
    """On a rank: what another number of ranks has saved, which it goes on with."""
    model, optimizer = made(seed=1)
    load_checkpoint(folder, model, optimizer)
    loaded = fingerprint(model), known(optimizer)
    assert sum(train(model, optimizer, 30)) / 30 < 1.8, "it was about 5 at the start"
    same_on_ranks(fingerprint(model))
    return loaded


@pytest.mark.ranks(1)
@pytest.mark.on_ranks(0)
@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((4, 2), (2, 4)))]
)
def test_another_number_of_ranks_goes_on_with_it(before, after, tmp_path):
    saved = on_ranks(save_for_others, before, arguments={"folder": tmp_path})
    assert set(on_ranks(load_of_others, after, arguments={"folder": tmp_path})) == set(saved)
