"""Biases and norms: however they travel the replicas agree and nothing is lost."""

from __future__ import annotations

import functools
import math
from typing import Any

import horovod.torch as hvd
import pytest
import torch.nn as nn
import torch.nn.functional as F

from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.training import batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
WAYS = ("fp32", "fp16", "bf16", "8bit", "auto")


@functools.cache
def _trained(way: str) -> tuple[nn.Module, list[float], int]:
    """Model, losses and bytes sent after 30 steps, in which nothing but the small tensors' values differs."""
    model = smooth_model()
    compression = Compression.dgc(0.05, values="fp32", dense_values=way, clip_norm=1.0)
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), compression)
    losses = train(model, optimizer, steps=30)
    return model, losses, optimizer.compression_stats()["bytes_sent"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way(way):
    exact, (model, losses, _) = _trained("fp32")[0], _trained(way)
    least, most = (0, 0) if way == "fp32" else (1e-7, 5e-2)
    assert least <= distance(weights(exact), weights(model)) <= most, "fewer bits do travel, and cost little"
    assert sum(losses[-5:]) < sum(losses[:5])
    same_on_ranks(fingerprint(model))


def test_fewer_bits_are_fewer_bytes():
    sent = {way: _trained(way)[2] for way in WAYS}
    assert sent["auto"] == sent["8bit"] < sent["bf16"] < sent["fp32"] and sent["fp16"] < sent["fp32"]


def test_nan_in_a_bias_stops_that_step_everywhere():
    """It travels in 8 bits."""
    model = smooth_model()
    optimizer = DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05))
    bad, moved = False, []
    model[0].bias.register_hook(lambda g: g * math.nan if bad else g)
    for step, (x, y) in enumerate(batches(6, hvd.rank())):
        before = weights(model).clone()
        bad = step == 2 and hvd.rank() == 1
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        moved.append(bool((weights(model) - before).norm() > 0))
    assert moved == [True, True, False, True, True, True]
    same_on_ranks(fingerprint(model))


@pytest.mark.parametrize("way", ["fp32", "8bit"])
def test_a_model_of_small_tensors_is_told_so(way):
    model: Any = nn.Linear(4, 4)
    with messages() as texts:
        DistributedOptimizer(momentum_sgd(model), model.named_parameters(), Compression.dgc(0.05, dense_values=way))
    assert sum("NOTHING IS COMPRESSED" in text for text in texts) == (hvd.rank() == 0), texts
