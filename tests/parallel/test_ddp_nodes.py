"""A hierarchical exchange without Horovod, on four ranks of two nodes, each with a torchrun of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dgc_horovod.testing.torch import session
from dgc_horovod.torch.ddp import Compression, load_checkpoint, save_checkpoint
from tests.helpers.ddp_training import made, made_plain, sgd, train
from tests.helpers.logs import messages
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.regression import UNROUNDED, batches, distance, fingerprint, weights

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.on_ranks(4, nodes=2)]
SAME = 1e-5


def _nesterov(model: torch.nn.Module) -> torch.optim.Optimizer:
    return sgd(model, lr=0.02, nesterov=True, weight_decay=1e-3)


def _made(**fields: Any) -> tuple[Any, Any]:
    return made(Compression.dgc(**{"density": 0.01, "exchange": "hierarchical", **fields}), _nesterov)


def test_each_worker_of_a_node_keeps_half():
    model, optimizer = _made()
    train(model, optimizer, 3)
    engines = [engine for engine in session(optimizer).exchange.engines if not engine.bucket.uncompressed]
    whole = sum(engine.whole.numel for engine in engines)
    assert sum(engine.state.v.size for engine in engines) == -(-whole // 2)
    assert optimizer.compression_stats()["bytes_inside_node"] > 0
    _, summed = made_plain(Compression.dgc(0.01, exchange="hierarchical"), _nesterov, average=False)
    assert session(summed).exchange.topology.node_size == 1


def test_replicas_are_bit_identical_and_learn():
    """Hundreds of steps, one of which is not finite on one rank; owners between the nodes as well."""
    for exchange in ("hierarchical", "hierarchical+sharded"):
        model, optimizer = _made(exchange=exchange, bucket_bytes=20_000, check_every=50)
        losses = []
        for number, (x, y) in enumerate(batches(300, dist.get_rank())):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            (loss * float("inf") if number == 100 and dist.get_rank() == 3 else loss).backward()
            optimizer.step()
            losses.append(float(loss))
        assert sum(losses[-20:]) / 20 < 0.5 * losses[0]
        assert session(optimizer).exchange.counts.steps == 300
        same_on_ranks(fingerprint(model))


def test_at_density_1_it_is_ddp_alone():
    """Everything sent and nothing masked: as far from DDP alone as rounding is."""
    dense = made(None, _nesterov)
    train(*dense, 10)

    def apart(**fields: Any) -> float:
        model, optimizer = _made(**{"density": 1.0, "factor_masking": False, **UNROUNDED, **fields})
        train(model, optimizer, 10)
        return distance(weights(dense[0]), weights(model))

    assert apart() <= SAME and apart(clip_norm=1e6) <= SAME
    assert apart(density=0.01) > 1e-3, "a compressed run equals a dense one: it was silently dense"


@pytest.mark.on_ranks(0)
@pytest.mark.ranks(2, "ddp")
def test_what_is_kept_is_saved_loaded_and_flushed(tmp_path):
    """What nodes have saved is loaded by them, and by ranks of another number without nodes."""
    on_ranks(resumed_and_flushed, 4, arguments={"folder": tmp_path}, nodes=2)
    on_ranks(resumed_without_nodes, 2, arguments={"folder": tmp_path})


def resumed_and_flushed(folder: Any) -> None:
    """A run, its checkpoint, and the rest of it from there; a flush leaves nothing."""
    ends = []
    for resumes in (False, True):
        model, optimizer = _made()
        if resumes:
            load_checkpoint(folder, model, optimizer)
        else:
            train(model, optimizer, 6)
            save_checkpoint(folder, model, optimizer)
        train(model, optimizer, 6)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
    optimizer.flush()
    assert sum(float(abs(x["v"]).sum()) for x in optimizer.residual_state_dict()["tensors"].values()) == 0
    same_on_ranks(fingerprint(model))


def resumed_without_nodes(folder: Any) -> None:
    """Ranks of one node load it."""
    model, optimizer = _made(exchange="flat")
    load_checkpoint(folder, model, optimizer)
    train(model, optimizer, 2)
    same_on_ranks(fingerprint(model))


@pytest.mark.on_ranks(2, nodes=1)
def test_one_node_alone_falls_back_in_words():
    with messages() as said:
        _, optimizer = _made()
    assert session(optimizer).exchange.topology.node_size == 1
    if dist.get_rank() == 0:
        first = next(text for text in said if "hierarchical" in text)
        assert "no hierarchical exchange" in first and "all workers are on one node" in first
