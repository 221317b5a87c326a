"""Around a step with DDP: whatever goes wrong on one rank is the same clear error on every rank, and nothing hangs."""

from __future__ import annotations

import copy
import io
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, WarmupSchedule, register
from tests.helpers.ddp_training import made, one_batch, sgd, train
from tests.helpers.errors import error_of, error_told, stay_away
from tests.helpers.loss_scaling import found_in_scripts
from tests.helpers.metrics_file import check_metrics_file
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.regression import UNROUNDED, adamw, batches, fingerprint, smooth_model

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
FIELDS: dict[str, Any] = {"density": 0.02, "min_numel": 64}
FEW = Compression.dgc(**FIELDS)


def test_what_is_refused_on_one_rank_is_told_on_all():
    error = error_of(lambda: made(FEW, lambda model: sgd(model, dampening=0.1 * dist.get_rank())))
    assert "refused: rank 0 has nothing, rank 1 has SGD's dampening" in error, error
    same_on_ranks(error)


def test_clipping_in_a_hook_before_the_step_is_learned():
    model, optimizer = made(FEW)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.5) and None)
    train(model, optimizer, 3)
    assert [clip.limit for clip in session(optimizer).exchange.clipping.clips] == [0.5]


@pytest.mark.parametrize("compression", [Compression.dgc(0.02), Compression.topk(0.02)], ids=["dgc", "topk"])
def test_a_layer_that_is_frozen_stays_as_with_ddp_alone(compression):
    """After a few steps, in weight decay and momentum of many more."""
    model, optimizer = made(compression, lambda model: sgd(model, weight_decay=0.01), find_unused_parameters=True)
    train(model, optimizer, 3)
    frozen = model.module[0].weight.requires_grad_(False)
    before = frozen.detach().clone()
    train(model, optimizer, 10)
    assert torch.equal(frozen, before)


def test_a_layer_that_is_frozen_in_all_dense_steps_is_none_that_was_forgotten():
    """The job stopped when the warm-up ended, as if no dense step had been applied; in the end it gets a gradient."""
    warmup = WarmupSchedule(steps=4, first_density=1.0, factor=1e-3)
    model, optimizer = made(
        Compression.dgc(0.05, min_numel=64, warmup=warmup),
        adamw,
        find_unused_parameters=True,
    )
    frozen = model.module[0].weight.requires_grad_(False)
    before = frozen.detach().clone()
    train(model, optimizer, 8)
    optimizer.flush()
    train(model, optimizer, 2)
    assert torch.equal(before, frozen)
    same_on_ranks(fingerprint(model))
    frozen.requires_grad_(True)
    train(model, optimizer, 4)
    moved = float((frozen.detach() - before).abs().max())
    assert 0.003 < moved < 0.1, "what had no second moment yet is measured first, and trained then"
    same_on_ranks(fingerprint(model))


def test_a_gradient_that_no_scaler_has_scaled_is_taken_as_it_is():
    """It was divided by the scale of a scaler that had been in use before, or beside it: weights exploded."""
    everything = Compression.dgc(1.0, factor_masking=False, min_numel=1, **UNROUNDED)
    found = found_in_scripts(
        lambda model, alone: made(None if alone else everything, lambda model: sgd(model, lr=0.02), model),
        dist.get_rank(),
    )
    for name, (from_stock, from_beginning) in found.items():
        assert from_stock < 1e-5 and from_beginning > 0.01, name


def test_a_whole_model_can_be_saved_and_copied():
    """The hook's state was a weak reference, which nothing can pickle: torch.save(model) failed.

    Loaded or copied, it can be registered, and trains as one that begins with its weights.
    """
    model, optimizer = made(FEW)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    fresh = DistributedDataParallel(smooth_model())
    fresh.load_state_dict(model.state_dict())
    ends = []
    for other in (fresh, loaded, copy.deepcopy(model)):
        own = register(other, sgd(other), FEW)
        train(other, own, 3)
        assert own.compression_stats()["steps"] == 3
        ends.append(fingerprint(other))
    assert ends[0] == ends[1] == ends[2]
    train(model, optimizer, 1)
    assert optimizer.compression_stats()["steps"] == 3
    same_on_ranks(ends[0])


def test_an_update_that_is_dropped_is_told_of():
    """Where the model's own zero_grad dropped it, as in GANs, it was an error that spoke of another cause."""
    ends = []
    for by in (1, 0):  # the optimizer, the model
        pair = model, optimizer = made(FEW)
        for i, (x, y) in enumerate(batches(3, dist.get_rank())):
            F.mse_loss(model(x), y).backward()
            if i:
                optimizer.step()
            pair[by].zero_grad()
        assert dist.get_rank() or session(optimizer).told == {"dropped"}
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
    same_on_ranks(ends)


PACKETS = WarmupSchedule(epochs=4)


@pytest.mark.parametrize(
    "compression",
    [
        Compression.dgc(0.001, warmup=PACKETS),
        Compression.dgc(0.001, warmup=WarmupSchedule(epochs=4, first_density=1.0)),
        Compression.dgc(0.001, warmup=PACKETS, clip_norm=1.0),
        Compression.dgc(0.001, warmup=PACKETS, exchange="hierarchical", node_size=2),
        Compression.local(steps=1, density=0.001, warmup=PACKETS),
    ],
    ids=["packets", "from density 1", "clipped", "nodes", "local"],
)
def test_another_epoch_on_one_rank_is_the_same_error_on_every_rank(compression):
    """Gloo ended the process that got the longer packet, from a thread of its own: no error named the epoch."""
    model, optimizer = made(compression)
    optimizer.set_epoch(0)
    train(model, optimizer, 2)
    optimizer.set_epoch(1 + dist.get_rank())
    error = error_of(lambda: train(model, optimizer, 1))
    assert "RankMismatch: step 2: the ranks are at different densities: rank 0 has" in error, error
    assert "in epoch 1, rank 1 has" in error and "in epoch 2." in error
    same_on_ranks(error)


def test_the_same_epochs_on_every_rank_train_as_counted_ones():
    """A warm-up that is told the epochs, and one that counts steps."""
    ends, sent = [], []
    for counted in (None, 2):
        warmup = WarmupSchedule(epochs=3, steps_per_epoch=counted)
        model, optimizer = made(Compression.dgc(0.01, min_numel=64, warmup=warmup))
        for epoch in range(6):
            optimizer.set_epoch(epoch)
            train(model, optimizer, 2)
        ends.append(fingerprint(model))
        sent.append(optimizer.compression_stats()["bytes_sent"])
    assert ends[0] == ends[1]
    assert sent[0] - sent[1] == 7 * 16  # in the 6 steps of the warm-up and the one after it


def test_a_metrics_file_that_cannot_be_written_stops_every_rank_alike():
    """Rank 1 had registered, and waited; on rank 0 the hook and the optimizer's claim were left behind.

    What is there goes on as with DDP alone.
    """
    model, optimizer = made(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DGC_METRICS_FILE", f"{os.devnull}/metrics.jsonl")
        error = error_of(lambda: register(model, optimizer, FEW))
    assert "refused: rank 0 has the metrics file" in error
    train(model, optimizer, 2)
    register(model, optimizer, FEW)
    train(model, optimizer, 2)
    same_on_ranks(error, fingerprint(model))


class AcceleratedOptimizer:
    """What accelerate puts around an optimizer, known by the state that it shares with it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state


def test_a_model_is_registered_again_with_another_choice():
    model, first = made(Compression.fp16)
    train(model, first, 2)
    optimizer = sgd(model)
    wrapped = AcceleratedOptimizer(optimizer)
    assert register(model, wrapped, FEW) is wrapped
    train(model, optimizer, 2)
    refused = error_of(lambda: register(model, wrapped, Compression.none))
    assert "make a new torch optimizer, and load this one's state_dict() after flush()" in refused
    train(model, optimizer, 2)
    assert optimizer.compression_stats()["steps"] == 4
    same_on_ranks(refused, fingerprint(model))


def trained_with_metrics() -> None:
    """On a rank."""
    train(*made(FEW), 4)


@pytest.mark.slow
@pytest.mark.on_ranks(0)
def test_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    on_ranks(trained_with_metrics, 2, environment={"DGC_METRICS_FILE": str(path)}, fresh=True)
    check_metrics_file(path, "dgc")


@pytest.mark.on_ranks(2, late=True, environment={"DGC_TIMEOUT": "5"})
@pytest.mark.parametrize("more_steps", [False, True])
def test_a_flush_that_not_every_rank_has_come_to(more_steps):
    """Its messages met packets of another size, and Gloo ended the process that got the longer ones.

    Rank 0 flushes and rank 1 goes on training; or rank 0 has a batch more, and DDP's own collectives are over.
    """
    model, optimizer = made(FEW, broadcast_buffers=not more_steps)
    train(model, optimizer, 2)

    def goes_on() -> None:
        if more_steps:
            train(model, optimizer, int(dist.get_rank() == 0))
        if more_steps or dist.get_rank() == 0:
            optimizer.flush()
        else:
            train(model, optimizer, 1)

    error = error_of(goes_on)
    assert error.startswith(("CollectiveTimeout: rank", "LostRank: rank")), error
    assert "CollectiveTimeout" not in error or "unequal shards?" in error


@pytest.mark.on_ranks(2, late=True, environment={"DGC_TIMEOUT": "5"})
def test_a_rank_that_makes_no_step(tmp_path):
    model, optimizer = made(FEW)
    if dist.get_rank() == 0:
        error = error_told(lambda: train(model, optimizer, 1), tmp_path)
        assert "CollectiveTimeout: rank 0 of 2 waited 5 s" in error
        return
    x, y = one_batch()
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    stay_away(tmp_path)


@pytest.mark.on_ranks(2, last=1, environment={"DGC_TIMEOUT": "2"})
def test_a_rank_that_does_not_register():
    model, optimizer = made(None)
    if dist.get_rank() == 1:
        time.sleep(4)
        return
    error = error_of(lambda: register(model, optimizer, Compression.dgc(0.02)))
    assert "CollectiveTimeout: rank 0 waited 2 s for register()" in error
