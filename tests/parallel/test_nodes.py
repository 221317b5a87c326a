"""A hierarchical exchange on four ranks of two nodes: replicas, equality to stock, clipping, what is kept.

Nodes are by Horovod's own list of hosts.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, load_checkpoint, node_process_sets, save_checkpoint
from dgc_horovod.torch.horovod_carrier import HorovodCollectives
from tests.helpers.errors import error_of
from tests.helpers.interrupted import handed_over, made
from tests.helpers.logs import messages
from tests.helpers.on_ranks import on_ranks, same_on_ranks
from tests.helpers.owed import owed
from tests.helpers.together import call_each
from tests.helpers.training import UNROUNDED, batches, distance, fingerprint, momentum_sgd, smooth_model, train, weights

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(4, nodes=2, timeout=500)]
FEW = Compression.dgc(density=0.01, exchange="hierarchical")
SAME = 1e-5


def _loss(model: Any) -> torch.Tensor:
    x, y = next(iter(batches(1, hvd.rank())))
    return F.mse_loss(model(x), y)


def _sparse(optimizer: Any) -> list[Any]:
    return [engine for engine in session(optimizer).exchange.engines if not engine.bucket.uncompressed]


def each_worker_of_a_node_keeps_half() -> None:
    model, optimizer = made(FEW)
    train(model, optimizer, 3)
    engines, stats = _sparse(optimizer), optimizer.compression_stats()
    every = sum(engine.whole.numel for engine in engines)
    assert sum(engine.state.v.size for engine in engines) == -(-every // 2)
    momentum = [engine.state.u.size for engine in session(optimizer).exchange.engines if engine.state.u is not None]
    assert sum(momentum) == -(-every // 2)
    assert stats["bytes_inside_node"] > every * 4 * 3 / 2 > 10 * stats["bytes_received"]


def a_card_keeps_to_its_budget() -> None:
    """What the ranks of a node receive of other nodes at a step."""
    model, optimizer = made(
        Compression.dgc(density=0.5, max_bytes_per_step=4000, dense_values="8bit", exchange="hierarchical")
    )
    train(model, optimizer, 5)
    received = hvd.allgather_object(optimizer.compression_stats()["bytes_received"] / 5)
    for node in (received[:2], received[2:]):
        assert 0.9 * 4000 < sum(node) <= 4000
    assert 0 < session(optimizer).exchange.config.density < 0.5


OPTIMIZERS: dict[str, Any] = {
    "decay": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd": momentum_sgd,
}


def at_density_1_it_is_stock_horovod() -> None:
    """Everything sent and nothing masked."""
    for name, make in OPTIMIZERS.items():
        model = smooth_model()
        train(model, hvd.DistributedOptimizer(make(model), named_parameters=model.named_parameters()), 10)
        dense = weights(model)
        for clip_norm in (None, 1e6):  # so high that it measures and changes nothing
            fields = {"clip_norm": clip_norm, "exchange": "hierarchical", **UNROUNDED}
            model, optimizer = made(Compression.dgc(density=1.0, factor_masking=False, **fields), make)
            train(model, optimizer, 10)
            assert distance(dense, weights(model)) <= SAME, (name, clip_norm)
    model, optimizer = made(FEW)
    train(model, optimizer, 10)
    assert distance(dense, weights(model)) > 1e-3, "a compressed run equals a dense one: it was silently dense"


def the_gradient_of_a_node_is_what_is_clipped() -> None:
    """One step of SGD with ``clip_norm``, and the same by hand: each node's mean gradient cut to sqrt(M)*c."""
    limit, lr = 0.01, 100.0
    config = Compression.dgc(density=1.0, factor_masking=False, clip_norm=limit, exchange="hierarchical", **UNROUNDED)
    model, optimizer = made(config, lambda model: torch.optim.SGD(model.parameters(), lr=lr))
    by_hand = smooth_model()
    before, sums = weights(by_hand), torch.zeros_like(weights(by_hand))
    for node in range(2):
        total = torch.zeros_like(sums)
        for x, y in (next(iter(batches(1, rank))) for rank in (2 * node, 2 * node + 1)):
            by_hand.zero_grad()
            F.mse_loss(by_hand(x), y).backward()
            total += torch.cat([p.grad.flatten() for p in by_hand.parameters()]) / 2
        assert float(total.norm()) > 2 * limit, "nothing was clipped"
        sums += total * min(1.0, math.sqrt(2) * limit / float(total.norm())) / 2
    train(model, optimizer, 1)
    assert distance(lr * sums, before - weights(model)) <= SAME


def a_script_that_clips_by_itself_is_refused_in_words() -> None:
    """A limit that nothing reaches only measures."""
    model, optimizer = made(FEW)
    _loss(model).backward()
    optimizer.synchronize()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) > 0
    assert "clip_norm" in error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def gradients_of_another_size_are_refused_before_they_are_averaged() -> None:
    """A script cuts tensors to a part after wrapping."""
    model, optimizer = made(FEW)
    model[4].weight.data, model[4].bias.data = model[4].weight.data[:8].clone(), model[4].bias.data[:8].clone()
    model[6].weight.data = model[6].weight.data[:, :8].clone()
    assert "as when the optimizer was wrapped" in error_of(lambda: train(model, optimizer, 1))


def what_is_kept_is_saved_loaded_and_flushed() -> None:
    """u and v, bit by bit."""
    ends = []
    for interrupted in (False, True):
        model, optimizer = made(FEW)
        train(model, optimizer, 6)
        if interrupted:
            model, optimizer = handed_over(
                model, optimizer, lambda model: DistributedOptimizer(momentum_sgd(model), model.named_parameters(), FEW)
            )
        train(model, optimizer, 6)
        ends.append(fingerprint(model))
    assert ends[0] == ends[1]
    before = weights(model)
    assert any(bool(parts["v"].any()) for parts in optimizer.residual_state_dict()["tensors"].values())
    optimizer.flush()
    assert not any(bool(parts["v"].any()) for parts in optimizer.residual_state_dict()["tensors"].values())
    assert distance(weights(model), before) > 1e-4
    same_on_ranks(fingerprint(model))


def a_number_of_workers_that_makes_no_nodes_is_named() -> None:
    """Nodes of a number that four ranks do not make, and of what is no number."""
    for wrong in (0, "2", True):
        error = error_of(lambda wrong=wrong: node_process_sets(wrong))
        assert error == f"ConfigError: node_size must be a whole number >= 1, got {wrong!r}"
    for number, words in ((3, "4 workers do not fill nodes of 3"), (4, "all workers are on one node")):
        assert node_process_sets(number) == []
        with messages() as logged:
            train(*made(FEW), 1)
        said = [text for text in logged if "no hierarchical exchange" in text]
        assert len(said) == (hvd.rank() == 0) and all(words in text for text in said)


def test_all():
    """Ranks on nodes are started for each test, which takes longer than these do."""
    call_each(
        each_worker_of_a_node_keeps_half,
        a_card_keeps_to_its_budget,
        at_density_1_it_is_stock_horovod,
        the_gradient_of_a_node_is_what_is_clipped,
        a_script_that_clips_by_itself_is_refused_in_words,
        gradients_of_another_size_are_refused_before_they_are_averaged,
        what_is_kept_is_saved_loaded_and_flushed,
        a_number_of_workers_that_makes_no_nodes_is_named,
    )


@pytest.mark.slow
def test_replicas_are_bit_identical_over_a_thousand_steps():
    """One of which is not finite on one rank."""
    model, optimizer = made(FEW, lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))

    def spoil(step: int) -> None:
        if step == 500 and hvd.rank() == 3:
            hook = model[0].weight.register_hook(lambda grad: (hook.remove(), grad * math.inf)[1])

    losses = train(model, optimizer, 1000, before_backward=spoil)
    assert sum(losses[-20:]) / 20 < 0.5 * losses[0]
    same_on_ranks(fingerprint(model))


def go_on(folder: Path, exchange: str) -> tuple[list[float], list[float]]:
    """On a rank: a run from what the last one has kept, if any; what ranks owe before it and after it."""
    model, optimizer = made(Compression.dgc(density=0.01, exchange=exchange))
    if (folder / "manifest.json").exists():
        load_checkpoint(folder, model, optimizer)
    before = owed(optimizer)
    assert (session(optimizer).exchange.topology.node_size == 2) == (exchange == "hierarchical")
    train(model, optimizer, 5)
    save_checkpoint(folder, model, optimizer)
    same_on_ranks(fingerprint(model))
    return before, owed(optimizer)


@pytest.mark.slow
@pytest.mark.on_ranks(0)
def test_what_is_owed_stays_from_nodes_to_other_numbers_of_ranks_and_back(tmp_path):
    last = None
    for workers, exchange in ((4, "hierarchical"), (4, "flat"), (2, "flat"), (4, "hierarchical")):
        given = {"folder": tmp_path, "exchange": exchange}
        before, after = on_ranks(go_on, workers, arguments=given, nodes=1 + (exchange != "flat"))[0]
        assert last is None or before == pytest.approx(last, rel=1e-5)
        assert all(abs(part) > 1e-3 for part in after)
        last = after


@pytest.mark.slow
def test_a_node_that_has_ended_does_not_end_the_last_step_of_another():
    """The script ends with a step, whose last round takes the first node two seconds longer."""
    model, optimizer = made(FEW)
    train(model, optimizer, 3)
    if session(optimizer).exchange.topology.node == 0:
        quick = HorovodCollectives.allgather

        def slow(self: HorovodCollectives, packet: torch.Tensor, name: str) -> Any:
            time.sleep(2 * (".inside" in self.tag))
            return quick(self, packet, name)

        HorovodCollectives.allgather = slow
    train(model, optimizer, 1)
    same_on_ranks(fingerprint(model))
