"""What holds when an optimizer goes back to its beginning, goes on from a stock one, or stays with stock Horovod."""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch

from dgc_horovod.planning.trial import COMPRESSED
from dgc_horovod.testing.torch import kept_by, session, take
from dgc_horovod.torch import Compression, load_checkpoint, save_checkpoint
from tests.helpers import interrupted
from tests.helpers.auto_modes import made, stock
from tests.helpers.interrupted import adamw
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import COMPRESSIONS, HALF, SMALL
from tests.helpers.training import (
    batches,
    distance,
    fingerprint,
    momentum_sgd,
    smooth_model,
    train,
    weights,
)

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


def test_stock_checkpoints_go_both_ways(tmp_path):
    """A stock checkpoint in a compressed run; a compressed one without compression."""
    topk = COMPRESSIONS["topk"]
    model = smooth_model()
    plain = momentum_sgd(model)
    x, y = next(iter(batches(1, 0)))
    for _ in range(3):
        plain.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        plain.step()
    other, optimizer = interrupted.made(topk)
    other.load_state_dict(model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train(other, optimizer, 3)
    optimizer.flush()  # else residuals would be lost
    save_checkpoint(tmp_path, other, optimizer, epoch=1)
    third, dense = interrupted.made(Compression.none)
    assert load_checkpoint(tmp_path, third, dense) == {"epoch": 1} and fingerprint(third) == fingerprint(other)
    train(third, dense, 3)
    save_checkpoint(tmp_path, third, dense)
    fourth, again = interrupted.made(topk)
    load_checkpoint(tmp_path, fourth, again)
    assert fingerprint(fourth) == fingerprint(third)


def test_what_coding_has_left_of_small_tensors_goes_with_the_first_dense_step(tmp_path):
    """Residuals of tensors that went in 8 bits, in a run where they go by allreduce."""

    def plain(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = interrupted.made(Compression.dgc(**SMALL, dense_values="8bit"), plain)
    biases = [name for name, p in model.named_parameters() if p.ndim == 1]
    interrupted.train_between(model, optimizer, 0, HALF)
    states = hvd.allgather_object(kept_by(optimizer))
    owed = {name: sum(state.tensors[name]["v"].astype(float) for state in states) / hvd.size() for name in biases}
    save_checkpoint(tmp_path, model, optimizer)
    model, optimizer = interrupted.made(Compression.dgc(**SMALL, dense_values="fp32"), plain)
    load_checkpoint(tmp_path, model, optimizer)
    coded = set(biases) - set(kept_by(optimizer).tensors)  # a bias of one element is coded without error
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    (0 * model(torch.zeros(1, 32)).sum()).backward()
    optimizer.step()
    moved = {n: (before[n] - p.detach()).numpy().astype(float) for n, p in model.named_parameters()}
    scale = max(float(abs(v).max()) for v in owed.values())
    assert len(coded) < len(owed) and scale > 0
    for name, v in owed.items():
        assert abs(moved[name] - 0.1 * v).max() < 1e-3 * 0.1 * scale  # of differences of fp32 weights


def test_adam_goes_on_after_a_flush_with_the_moments_it_had():
    """And what another flush leaves in stock."""
    model, optimizer = interrupted.made(
        Compression.dgc(density=0.05), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)
    )

    def second():
        return float(session(optimizer).exchange.second["0.weight"].square().sum())

    train(model, optimizer, 30)
    before = second()
    optimizer.flush()
    train(model, optimizer, 1)
    assert 0.9 < second() / before < 1.2
    optimizer.flush()
    assert float(optimizer.state[model[0].weight]["step"]) == 31
