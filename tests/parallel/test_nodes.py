"""A hierarchical exchange on four ranks of two nodes, and a sharded one: equality to stock, clipping, what is kept.

Nodes are by Horovod's own list of hosts, or each has a torchrun of its own.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.logs import messages
from tests.helpers.on_ranks import same_on_ranks
from tests.helpers.run import ALONE, UNROUNDED, distance

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(4, nodes=2, timeout=500)]
FEW: dict[str, Any] = {"density": 0.01, "exchange": "hierarchical"}
EVERYTHING = {**FEW, "density": 1.0, "factor_masking": False, **UNROUNDED}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
SAME = 1e-5


def _started(adapter: Any, fields: dict[str, Any], seed: int = 0, **optimizer: Any) -> Any:
    return adapter.start(Compression.dgc(**fields), seed=seed, **(optimizer or SGD))


def check_density_1(adapter: Any, exchange: str) -> None:
    """Everything sent and nothing masked: as far from the framework's own training as rounding is.

    Keras: from training in one process on all data.
    """
    for optimizer in (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {"lr": 0.1},
        SGD,
    ):
        dense = adapter.start(ALONE if adapter.kind == "keras" else None, **optimizer)
        for _ in range(10):
            x, y = dense.batch()
            if adapter.kind == "keras":
                x, y = map(np.concatenate, zip(*adapter.of_all_ranks((x, y)), strict=True))
            dense.on(x, y)
        for clip_norm in (None, 1e6):  # so high that it measures and changes nothing
            run = _started(adapter, {**EVERYTHING, "exchange": exchange, "clip_norm": clip_norm}, **optimizer)
            run.train(10)
            assert distance(dense.weights, run.weights) <= SAME, (optimizer, clip_norm)
    for fields in (FEW, {**EVERYTHING, "clip_norm": 0.01}):
        run = _started(adapter, {**fields, "exchange": exchange})
        run.train(10)
        assert distance(dense.weights, run.weights) > 1e-3, "it equals a dense run: it was silently one"


def check_kept(adapter: Any, exchange: str, folder: Path) -> None:
    """What is kept is saved, loaded and flushed, bit by bit: by a checkpoint, and by a rank's own record."""
    for name, optimizer in (("AdamW", {"name": "AdamW"}), ("SGD", SGD)):
        fields = {**FEW, "exchange": exchange, "clip_norm": 0.5}
        whole, resumed, by_record = (_started(adapter, fields, seed, **optimizer) for seed in (0, 5, 5))
        whole.train(6)
        whole.save(folder / name)
        resumed.load(folder / name)
        by_record.load(folder / name, residuals="ignored")
        by_record.optimizer.load_residual_state_dict(whole.optimizer.residual_state_dict())
        for run in (whole, resumed, by_record):
            run.steps = 6
            run.train(6)
        assert whole.print == resumed.print == by_record.print
        same_on_ranks(whole.print, whole.exchange.second.packed().tolist())
        if (adapter.kind, name) == ("keras", "AdamW"):
            slots: dict[str, np.ndarray] = {}
            whole.optimizer.save_own_variables(slots)
            same_on_ranks([float(x.sum()) for x in slots.values() if np.ndim(x) == 2])
    before = whole.weights
    assert any(parts["v"].any() for parts in whole.kept().values()) and abs(whole.owed()[0]) > 1e-6
    assert exchange != "sharded" or whole.compressed[0].state.remainder.any()
    whole.optimizer.flush()
    assert not any(parts["v"].any() for parts in whole.kept().values()) and whole.owed()[0] == 0
    assert distance(whole.weights, before) > 1e-4
    same_on_ranks(whole.print)


def check_replicas(adapter: Any, steps: int, **fields: Any) -> Any:
    """Many steps, one of which is not finite on one rank; returns the run."""
    run = _started(adapter, fields, lr=0.01, momentum=0.9)
    last = len(adapter.of_all_ranks(0)) - 1
    run.spoilt = (steps // 2,) if adapter.rank == last else ()
    losses, stats = run.train(steps), run.optimizer.compression_stats()
    assert sum(losses[-20:]) / 20 < 0.5 * losses[0]
    assert (stats["steps"], stats["skipped"]) == (steps, 1)
    same_on_ranks(run.print)
    return run


def each_worker_of_a_node_keeps_half(adapter: Any) -> None:
    run = _started(adapter, FEW)
    run.train(3)
    stats, every = run.optimizer.compression_stats(), sum(engine.whole.numel for engine in run.compressed)
    for part in ("v", "u"):
        kept = [getattr(engine.state, part) for engine in (run.compressed if part == "v" else run.exchange.engines)]
        assert sum(x.size for x in kept if x is not None) == -(-every // 2)
    assert stats["bytes_inside_node"] > every * 4 * 3 / 2 > 10 * stats["bytes_received"]
    if adapter.name == "DDP":
        summed = Adapter("without DDP").start(Compression.dgc(**FEW), wrap={"average": False})
        assert summed.exchange.topology.node_size == 1


def the_gradient_of_a_node_is_what_is_clipped(adapter: Any) -> None:
    """One step of SGD with ``clip_norm``, and the same by hand: each node's mean gradient cut to sqrt(M)*c."""
    limit, rate = 0.01, 100.0
    run = _started(adapter, {**EVERYTHING, "clip_norm": limit}, lr=rate)
    before, own = run.weights, run.gradients(*run.batch())
    every, wanted = adapter.of_all_ranks(np.concatenate([x.ravel() for x in own])), np.zeros_like(before)
    for node in (every[:2], every[2:]):
        mean = np.mean(node, axis=0)
        assert np.linalg.norm(mean) > 2 * limit, "nothing was clipped"
        wanted += rate * mean * min(1.0, math.sqrt(2) * limit / float(np.linalg.norm(mean))) / 2
    run.apply(own)
    assert distance(wanted, before - run.weights) <= SAME


def a_card_keeps_to_its_budget(adapter: Any) -> None:
    """What the ranks of a node receive of other nodes at a step."""
    run = _started(adapter, {**FEW, "density": 0.5, "max_bytes_per_step": 4000, "dense_values": "8bit"})
    run.train(5)
    received = adapter.of_all_ranks(run.optimizer.compression_stats()["bytes_received"] / 5)
    for node in (received[:2], received[2:]):
        assert 0.9 * 4000 < sum(node) <= 4000
    assert 0 < run.exchange.config.density < 0.5


def a_script_that_clips_by_itself_is_refused_in_words(adapter: Any) -> None:
    """A limit that nothing reaches only measures."""
    from torch import nn

    model, optimizer = adapter.made(Compression.dgc(**FEW))
    x, y = next(iter(adapter.batches(1)))
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.synchronize()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) > 0
    assert "clip_norm" in error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def gradients_of_another_size_are_refused_before_they_are_averaged(adapter: Any) -> None:
    """A script cuts tensors to a part after wrapping."""
    run = _started(adapter, FEW)
    model = run.model
    model[4].weight.data, model[4].bias.data = model[4].weight.data[:8].clone(), model[4].bias.data[:8].clone()
    model[6].weight.data = model[6].weight.data[:, :8].clone()
    assert "as when the optimizer was wrapped" in error_of(run.train)


def a_number_of_workers_that_makes_no_nodes_is_named(adapter: Any) -> None:
    """Nodes of a number that four ranks do not make, and of what is no number."""
    for wrong in (0, "2", True):
        error = error_of(lambda wrong=wrong: adapter.module.node_process_sets(wrong))
        assert error == f"ConfigError: node_size must be a whole number >= 1, got {wrong!r}"
    for number, words in ((3, "4 workers do not fill nodes of 3"), (4, "all workers are on one node")):
        assert adapter.module.node_process_sets(number) == []
        _check_that_it_falls_back(adapter, words)


def _check_that_it_falls_back(adapter: Any, words: str) -> None:
    with messages() as logged:
        run = _started(adapter, FEW)
        run.train(1)
    assert run.exchange.topology.node_size == 1
    said = [text for text in logged if "no hierarchical exchange" in text]
    assert len(said) == (adapter.rank == 0) and all(words in text for text in said)


@on_adapters("Horovod", slow=("DDP", "Keras"))
def test_all(adapter, tmp_path):
    """Ranks on nodes are started for each test, which takes longer than these do."""
    each_worker_of_a_node_keeps_half(adapter)
    check_density_1(adapter, "hierarchical")
    the_gradient_of_a_node_is_what_is_clipped(adapter)
    check_kept(adapter, "hierarchical", tmp_path)
    if adapter.name == "Horovod":
        a_card_keeps_to_its_budget(adapter)
        a_script_that_clips_by_itself_is_refused_in_words(adapter)
        gradients_of_another_size_are_refused_before_they_are_averaged(adapter)
        a_number_of_workers_that_makes_no_nodes_is_named(adapter)


@on_adapters("Horovod", slow=("Keras",))
@pytest.mark.on_ranks(3, nodes=1)
def test_elements_have_owners(adapter, tmp_path):
    check_density_1(adapter, "sharded")
    check_kept(adapter, "sharded", tmp_path)


@on_adapters(slow=("DDP",))
@pytest.mark.on_ranks(2, nodes=1)
def test_one_node_alone_falls_back_in_words(adapter):
    _check_that_it_falls_back(adapter, "all workers are on one node")


@on_adapters(slow=("Horovod", "DDP"))
def test_replicas_are_bit_identical_over_a_thousand_steps(adapter):
    """Owners between the nodes as well."""
    for exchange in ("hierarchical", "hierarchical+sharded"):
        check_replicas(adapter, 1000, density=0.01, exchange=exchange, bucket_bytes=20_000, check_every=50)


@on_adapters(slow=("Horovod", "Keras"))
def test_a_node_that_has_ended_does_not_end_the_last_step_of_another(adapter):
    """The script ends with a step, whose last round takes the first node longer."""
    run = _started(adapter, FEW)
    run.train(3)
    if run.exchange.topology.node == 0:
        _slow_inside_a_node(adapter)
    run.train(1)
    same_on_ranks(run.print)


def _slow_inside_a_node(adapter: Any) -> None:
    if adapter.kind == "torch":
        from dgc_horovod.torch.horovod_carrier import HorovodCollectives as Collectives
    else:
        from dgc_horovod.tensorflow.gradients.transport import Collectives
    quick = Collectives.allgather

    def slow(self: Any, packet: Any, name: str) -> Any:
        if ".inside" not in self.tag:
            return quick(self, packet, name)
        if adapter.kind == "torch":
            time.sleep(2)
            return quick(self, packet, name)
        import tensorflow as tf

        with tf.control_dependencies([tf.py_function(lambda: time.sleep(0.5), [], [])]):
            return quick(self, tf.identity(packet), name)

    Collectives.allgather = slow
