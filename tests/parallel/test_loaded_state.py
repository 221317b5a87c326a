"""What holds when an optimizer goes back to its beginning, or stays with stock Horovod."""

from __future__ import annotations

import copy

import pytest
import torch

from dgc_horovod.planning.trial import COMPRESSED
from dgc_horovod.testing.torch import session, take
from dgc_horovod.torch import Compression
from tests.helpers import interrupted
from tests.helpers.auto_modes import made, stock
from tests.helpers.interrupted import adamw
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import distance, fingerprint, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]


def test_adam_begins_with_nothing_once_more():
    """A state that has made no step: what was known of Adam's second moment goes with the weights."""
    model, optimizer = interrupted.made(Compression.dgc(0.05, min_numel=16), adamw)
    begin, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 26)
    model.load_state_dict(begin)
    optimizer.load_state_dict(state)
    assert not session(optimizer).exchange.second.known
    losses = train(model, optimizer, 60)
    assert sum(losses[-5:]) < sum(losses[:5])
    same_on_ranks(fingerprint(model))


def test_auto_begins_with_dense_steps_once_more():
    """AdamW under ``auto``, compressed: a state that has made no step goes on compressed."""
    model, optimizer = made(adamw)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 4)
    take(optimizer, COMPRESSED)
    train(model, optimizer, 4)
    optimizer.load_state_dict(state)
    assert session(optimizer).strategy.choice.trial.mode == COMPRESSED
    train(model, optimizer, 4)
    same_on_ranks(fingerprint(model))


def test_a_limit_holds_where_nothing_is_compressed():
    """``auto`` that cannot compress an optimizer clips the averages all the same."""

    def damped(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)

    model, optimizer = made(damped, mode=None, clip_norm=0.5)
    train(model, optimizer, 24)
    assert not hasattr(optimizer, "compression_stats")
    assert distance(weights(model), weights(stock(damped, clip=0.5))) < 1e-6
    assert distance(weights(model), weights(stock(damped))) > 1e-4
