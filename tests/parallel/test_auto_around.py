"""Compression.auto on Horovod: what scripts do around it, ranks that run out of data, what cannot be compressed."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from dgc_horovod.planning.trial import COMPRESSED, DENSE, MOST_TIMED, SETTLING, TIMED
from dgc_horovod.testing.torch import session, take
from dgc_horovod.torch import Compression, load_checkpoint, save_checkpoint
from tests.helpers import training
from tests.helpers.errors import error_told, stay_away
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import adamw, nesterov, sgd
from tests.helpers.run import STEPS
from tests.helpers.training import batches, distance, fingerprint, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def _made(mode: str | None = DENSE, make: Any = nesterov, on_trial: bool = False) -> tuple[Any, Any]:
    """A model and its optimizer, whose exchange stays what it is until it is told; mode None: it chooses."""
    model, optimizer = training.made(Compression.auto(density=0.05, min_numel=16), make)
    if mode is not None:
        take(optimizer, mode, on_trial=on_trial)
    return model, optimizer


def test_a_model_in_channels_last_begins_with_stock_horovod_too():
    """It ended in stock Horovod's error, "Tensor is required to be contiguous", where method dgc works."""
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 10)
        model = nn.Sequential(*layers).to(memory_format=layout)
        _, optimizer = training.made(Compression.auto(density=1.0, min_numel=16, values="fp32"), nesterov, model)
        torch.manual_seed(hvd.rank())
        for mode in (DENSE, COMPRESSED, DENSE):
            take(optimizer, mode)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 3, 8, 8).to(memory_format=layout)).square().mean().backward()
                optimizer.step()
        ends.append(weights(model))
    assert distance(*ends) < 1e-3 and model[0].weight.is_contiguous(memory_format=torch.channels_last)
    same_on_ranks(fingerprint(model))


def _norm_of(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([x.flatten() for x in tensors]).norm())


def _train_clipped(model: nn.Module, optimizer: Any, data: Any, scale: float = 1.0) -> str:
    """Steps of a script that clips averages by itself; returns the fingerprint."""
    for x, y in data:
        optimizer.zero_grad()
        (scale * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    return fingerprint(model)


def test_a_scripts_clipping_is_stocks_first_and_local_afterwards():
    (model, optimizer), stock = _made(), training.made(None, nesterov)
    ends = [_train_clipped(*pair, batches(STEPS, hvd.rank())) for pair in ((model, optimizer), stock)]
    assert ends[0] == ends[1]
    before = _norm_of([state["momentum_buffer"] for state in optimizer.state.values()])
    take(optimizer, COMPRESSED)
    first, *others = batches(4, hvd.rank(), seed=2)
    _train_clipped(model, optimizer, [first], scale=30)  # far beyond the limit
    kept = optimizer.residual_state_dict()["tensors"].values()
    momentum = _norm_of([arrays["u"] for arrays in kept if "u" in arrays]) / before
    assert momentum > 0.4, "the first compressed step has scaled the momentum of the dense ones away"
    _train_clipped(model, optimizer, others, scale=30)
    assert hvd.rank() or "clipping" in session(optimizer).told
    same_on_ranks(fingerprint(model))


@pytest.mark.on_ranks(2, last=2)
@pytest.mark.parametrize(
    ("mode", "on_trial", "more"),
    [(None, False, 2 * TIMED), (COMPRESSED, False, 6), (COMPRESSED, True, 2)],
    ids=["alone", "compressed", "in a trial"],
)
def test_ranks_that_run_out_of_data_choose_alike(mode, on_trial, more):
    """One comes to its comparison alone; or a trial cannot end, and stock Horovod's exchange stays."""
    model, optimizer = _made(mode, on_trial=on_trial)
    train(model, optimizer, (3 if on_trial else TIMED // 2) + more * hvd.rank())
    hvd.join()
    choice = session(optimizer).strategy.choice
    assert (choice.ended, choice.mode) == (True, COMPRESSED if mode and not on_trial else DENSE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
    same_on_ranks(session(optimizer).exchange.steps)  # a checkpoint is of one step
    train(model, optimizer, 4)
    same_on_ranks(fingerprint(model))


class _Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(x))


def test_sparse_gradients_are_left_to_stock_horovod():
    torch.manual_seed(0)
    plain = partial(sgd, lr=0.1, momentum=0.0)
    model, optimizer = training.made(Compression.auto(min_numel=16), plain, _Embedded())
    for step in range(SETTLING + MOST_TIMED):
        optimizer.zero_grad()
        model(torch.tensor([step % 50, hvd.rank()])).square().sum().backward()
        optimizer.step()
    choice = session(optimizer).strategy.choice
    assert (choice.mode, choice.ended, choice.seconds) == (DENSE, True, {})


def test_gradients_are_there_after_a_switch():
    model, optimizer = _made(COMPRESSED)
    train(model, optimizer, 2)
    take(optimizer, DENSE)
    assert all(p.grad is not None for p in model.parameters())


def test_adam_goes_on_compressed_from_a_state_that_has_made_no_step():
    model, optimizer = _made(make=adamw)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 4)
    take(optimizer, COMPRESSED)
    train(model, optimizer, 4)
    optimizer.load_state_dict(state)
    assert session(optimizer).strategy.choice.mode == COMPRESSED
    train(model, optimizer, 4)
    same_on_ranks(fingerprint(model))


def test_a_choice_is_made_anew_after_a_trial_that_was_interrupted(tmp_path):
    model, optimizer = _made(COMPRESSED, on_trial=True)
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, model, optimizer)
    for load in (False, True):
        if load:
            model, optimizer = _made(None)
            load_checkpoint(tmp_path, model, optimizer)
        choice = session(optimizer).strategy.choice
        assert (choice.mode, choice.ended) == (DENSE, False)


@pytest.mark.slow
@pytest.mark.on_ranks(2, environment={"DGC_TIMEOUT": "12"}, fresh=True)
def test_a_rank_that_stays_away_from_a_dense_step_is_an_error_not_a_hang(tmp_path):
    hvd.init()
    model, optimizer = _made()
    train(model, optimizer, 2)
    if hvd.rank() == 0:
        assert "waited 12 s for allreduce." in error_told(lambda: train(model, optimizer, 1), tmp_path)
    else:
        stay_away(tmp_path)
