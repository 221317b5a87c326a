"""Local steps over torch.distributed, under DDP and on plain models, on real ranks without Horovod."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dgc_horovod.torch.ddp import Compression, load_checkpoint, save_checkpoint
from tests.helpers.ddp_training import made, made_plain, of_all_ranks, step, train
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, smooth_model, weights

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(2)]
H = 5
WHOLE: dict[str, Any] = {"density": 1.0, "local_decay": 1.0, "outer_momentum": 0.0, "outer_rate": 1.0, **UNROUNDED}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def _made(ddp: bool = True, **fields: Any) -> tuple[Any, Any]:
    compression = Compression.local(**{"steps": H, "density": 0.1, "min_numel": 64, **fields})
    return made(compression, _adamw, bucket_cap_mb=0.01) if ddp else made_plain(compression, _adamw)


@pytest.mark.parametrize("way", ["DDP", "plain", "scaled"])
def test_at_density_1_the_weights_become_their_mean(way):
    """Each rank trains alone, and every H steps the weights become their mean."""
    alone = smooth_model()
    inner = _adamw(alone)
    for number, batch in enumerate(batches(4 * H, dist.get_rank()), 1):
        step(alone, inner, *batch)
        if number % H == 0:
            mean = weights(alone)
            dist.all_reduce(mean)
            nn.utils.vector_to_parameters(mean / dist.get_world_size(), alone.parameters())
    model, optimizer = _made(way != "plain", **WHOLE)
    train(model, optimizer, 4 * H, torch.amp.GradScaler("cpu") if way == "scaled" else None)
    assert distance(weights(alone), weights(model)) <= 1e-5


@pytest.mark.parametrize("ddp", [True, False])
def test_replicas_are_equal_after_each_exchange_and_only_then(ddp):
    model, optimizer = _made(ddp)
    seen = []
    for batch in batches(12 * H, dist.get_rank()):
        step(model, optimizer, *batch)
        seen.append(fingerprint(model))
    assert optimizer.compression_stats()["steps"] == 12
    same = [a == b for a, b in zip(*of_all_ranks(seen), strict=True)]
    assert same == [number % H == 0 for number in range(1, 12 * H + 1)]


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Saved in the middle of a round, which an exchange ends, and resumed: the same run, bit for bit."""
    ends, data = [], list(batches(6 * H, dist.get_rank()))
    for stops in (False, True):
        model, optimizer = _made()
        for batch in data[: 2 * H + 2]:
            step(model, optimizer, *batch)
        save_checkpoint(tmp_path / str(stops), model, optimizer)
        if stops:
            kept = set(optimizer.state_dict()["state"][0])
            model, optimizer = _made()
            load_checkpoint(tmp_path / str(stops), model, optimizer)
            assert set(optimizer.state_dict()["state"][0]) == kept
        for batch in data[2 * H + 2 :]:
            step(model, optimizer, *batch)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
    optimizer.flush()
    same_on_ranks(fingerprint(model))


def test_sums_are_refused():
    assert "average" in error_of(lambda: made_plain(Compression.local(steps=H), _adamw, average=False))
