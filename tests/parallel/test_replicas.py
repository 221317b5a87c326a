"""Replicas are bit-identical on every backend of Horovod, whatever is selected and whenever it arrives."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer, WarmupSchedule
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.together import all_of, call_each
from tests.helpers.training import INPUTS, batches, fingerprint, smooth_model, train

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
each_number_of_ranks = pytest.mark.usefixtures("workers")
COMPRESSIONS = {
    "dgc": Compression.dgc(0.01),
    "dgc fp16 clip warm-up": Compression.dgc(
        0.01, values="fp16", clip_norm=1.0, warmup=WarmupSchedule(steps=30), bucket_bytes=8192
    ),
    "topk": Compression.topk(0.01, compress_1d=True, min_numel=1),
    "sampled": Compression.sampled(0.01),
    "gaussian": Compression.gaussian(0.01),
    "gaussian dgc": Compression.dgc(0.01, rule="gaussian"),
}


def _wrapped(model: nn.Module, compression: Any, nesterov: bool = False) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=nesterov)
    return DistributedOptimizer(sgd, model.named_parameters(), compression)


@each_number_of_ranks
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_replicas_identical_after_50_steps_of_every_rule(name):
    model = smooth_model()
    optimizer = _wrapped(model, COMPRESSIONS[name], nesterov=name == "topk")
    losses = train(model, optimizer, steps=50)
    assert sum(losses[-5:]) < sum(losses[:5]), "it does not learn"
    stats = optimizer.compression_stats()
    most = 0.3 if name == "dgc fp16 clip warm-up" else 0.0115
    assert 0.002 < stats["selected"] / stats["elements"] <= most, "it was dense or silent"
    assert stats["bytes_sent"] < 0.6 * stats["bytes_dense"]
    same_on_ranks(fingerprint(model))


class _TwoBranches(nn.Module):
    """Backward reaches the two branches in an order that depends on the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(INPUTS, 64), nn.Linear(INPUTS, 64)
        self.head = nn.Linear(64, 1)
        self.left_first = rank % 2 == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left_first:
            a = torch.tanh(self.left(x))
            hidden = a + torch.tanh(self.right(x))
        else:
            b = torch.tanh(self.right(x))
            hidden = b + torch.tanh(self.left(x))
        return self.head(hidden)


@each_number_of_ranks
def test_arrival_order():
    """Buckets of one tensor each, completed in different orders on even and odd ranks."""
    model = _TwoBranches(hvd.rank())
    order: list[str] = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    train(model, _wrapped(model, Compression.dgc(0.01, bucket_bytes=64, min_numel=1)), steps=30)
    first, second, *_ = hvd.allgather_object(order[: len(list(model.parameters()))])
    assert first != second, "the test no longer produces different orders"
    same_on_ranks(fingerprint(model))


@each_number_of_ranks
def test_unused_parameters():
    """A branch that only odd ranks use, and only in odd steps."""
    model = _TwoBranches(hvd.rank())
    optimizer = _wrapped(model, Compression.dgc(0.01, bucket_bytes=64))
    before = model.right.weight.detach().clone()
    for step, (x, y) in enumerate(batches(30, hvd.rank())):
        optimizer.zero_grad()
        hidden = torch.tanh(model.left(x))
        if hvd.rank() % 2 and step % 2:
            hidden = hidden + torch.tanh(model.right(x))
        F.mse_loss(model.head(hidden), y).backward()
        optimizer.step()
    assert (model.right.weight - before).norm() > 0, "what one rank alone used never arrived"
    same_on_ranks(fingerprint(model))


@each_number_of_ranks
def test_a_second_optimizer():
    """Two models of the same parameter names, each with its own optimizer, in flight at once."""
    # packets only: a ring adds in an order that depends on what Horovod fuses
    compression = Compression.dgc(0.01, compress_1d=True, min_numel=1)
    models = [smooth_model(seed) for seed in (0, 1)]
    optimizers = [_wrapped(model, compression) for model in models]
    for x, y in batches(20, hvd.rank()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (F.mse_loss(models[0](x), y) + F.mse_loss(models[1](x), y)).backward()
        for optimizer in reversed(optimizers) if hvd.rank() % 2 else optimizers:
            optimizer.step()
    alone = smooth_model(1)
    train(alone, _wrapped(alone, compression), steps=20)
    assert fingerprint(models[1]) == fingerprint(alone), "a second optimizer changed the result of the first"
    same_on_ranks([fingerprint(model) for model in models])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.on_ranks(2, controller="mpi")
def test_all_over_mpi():
    call_each(*all_of(__name__))
