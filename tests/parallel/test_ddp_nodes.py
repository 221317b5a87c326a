"""A hierarchical exchange without Horovod, on four ranks of two nodes."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
SAME = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def ranks(folder):
    cases = [f"ddp_nodes.{case}" for case in ("layout", "long_run", "stock", "saved")]
    return run_torch_ranks(4, cases, timeout=300, folder=folder, nodes=2)


def test_each_worker_of_a_node_keeps_half(ranks):
    for found in (rank["ddp_nodes.layout"] for rank in ranks):
        assert found["summed"] == 1
        assert found["kept"] == -(-found["all"] // 2) and found["inside"] > 0


def test_replicas_are_bit_identical_and_learn(ranks):
    first = ranks[0]["ddp_nodes.long_run"]
    for rank in ranks:
        for exchange, (weights, before, after, steps) in rank["ddp_nodes.long_run"].items():
            assert weights == first[exchange][0] and after < 0.5 * before and steps == 300


def test_at_density_1_it_is_ddp_alone(ranks):
    found = dict(ranks[0]["ddp_nodes.stock"])
    assert found.pop("compressed") > 1e-3, "a compressed run equals a dense one: it was silently dense"
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_what_is_kept_is_saved_loaded_and_flushed(ranks, folder):
    for found in (rank["ddp_nodes.saved"] for rank in ranks):
        assert found["same"] and found["left"] == 0
    assert len({rank["ddp_nodes.saved"]["flushed"] for rank in ranks}) == 1
    others = run_torch_ranks(2, ["ddp_nodes.loaded"], folder=folder)
    assert others[0] == others[1]


def test_one_node_alone_falls_back_in_words():
    first, second = run_torch_ranks(2, ["ddp_nodes.falls_back"])
    assert first["ddp_nodes.falls_back"]["node size"] == second["ddp_nodes.falls_back"]["node size"] == 1
    assert "no hierarchical exchange" in first["ddp_nodes.falls_back"]["said"][0]
    assert "all workers are on one node" in first["ddp_nodes.falls_back"]["said"][0]
