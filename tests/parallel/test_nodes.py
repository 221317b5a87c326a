"""A hierarchical exchange on four ranks of two nodes: replicas, equality to stock, clipping, what is kept."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["layout", "budget", "stock", "clipping", "refused", "cut", "state", "misdeclared"]
SAME = 1e-5


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(4, [f"nodes.{case}" for case in CASES], "nodes", 500)


@pytest.fixture(scope="module")
def keras_ranks():
    return run_ranks(4, ["keras_nodes.layout", "keras_nodes.stock"], "nodes", 500)


def test_each_worker_of_a_node_keeps_half(ranks):
    for found in (rank["nodes.layout"] for rank in ranks):
        assert found["kept"] == found["momentum"] == -(-found["all"] // 2)
        assert found["inside"] > found["all"] * 4 * 3 / 2 > 10 * found["received"]


def test_a_card_keeps_to_its_budget(ranks):
    for node in (ranks[:2], ranks[2:]):
        received = sum(rank["nodes.budget"]["received"] for rank in node)
        assert 0.9 * 4000 < received <= 4000 and 0 < node[0]["nodes.budget"]["density"] < 0.5


@pytest.mark.slow
def test_replicas_are_bit_identical_over_a_thousand_steps():
    found = [rank["nodes.long_run"] for rank in run_ranks(4, ["nodes.long_run"], "nodes", 500)]
    assert len({each["fingerprint"] for each in found}) == 1
    assert all(each["last"] < 0.5 * each["first"] for each in found), found


def test_at_density_1_it_is_stock_horovod(ranks):
    found = dict(ranks[0]["nodes.stock"])
    assert found.pop("compressed") > 1e-3, "a compressed run equals a dense one: it was silently dense"
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_the_gradient_of_a_node_is_what_is_clipped(ranks):
    for found in (rank["nodes.clipping"] for rank in ranks):
        assert found["least norm"] > 2 * found["limit"], "nothing was clipped"
        assert found["distance"] <= SAME


def test_a_script_that_clips_by_itself_is_refused_in_words(ranks):
    for found in (rank["nodes.refused"] for rank in ranks):
        assert "clip_norm" in found["error"] and found["norm"] > 0


def test_gradients_of_another_size_are_refused_before_they_are_averaged(ranks):
    for rank in ranks:
        assert "as when the optimizer was wrapped" in rank["nodes.cut"]


def test_a_number_of_workers_that_makes_no_nodes_is_named(ranks):
    for rank, found in enumerate(each["nodes.misdeclared"] for each in ranks):
        for error, wrong in zip(found["refused"], ("0", "'2'", "True"), strict=True):
            assert error == f"ConfigError: node_size must be a whole number >= 1, got {wrong}"
        assert found["sets of 3"] == found["sets of 4"] == []
        assert len(found["nodes of 3"]) == len(found["nodes of 4"]) == (rank == 0)
        assert rank or "4 workers do not fill nodes of 3" in found["nodes of 3"][0]
        assert rank or "all workers are on one node" in found["nodes of 4"][0]


def test_what_is_kept_is_saved_loaded_and_flushed(ranks):
    for found in (rank["nodes.state"] for rank in ranks):
        assert found["runs"][0] == found["runs"][1]
        assert found["mass"] > 0 == found["left"] and found["moved"] > 1e-4
    assert len({rank["nodes.state"]["replica"] for rank in ranks}) == 1


@pytest.mark.slow
def test_under_keras_each_worker_keeps_half_and_flush_leaves_nothing(keras_ranks):
    found = [rank["keras_nodes.layout"] for rank in keras_ranks]
    assert len({each["fingerprint"] for each in found}) == 1
    assert len({each["adam"] for each in found}) == 1
    for each in found:
        assert each["kept"] == -(-each["all"] // 2) and each["inside"] > 24 * each["all"] * 4 / 2
        assert each["moved"] > 1e-4 and each["left"] == 0


@pytest.mark.slow
def test_under_keras_at_density_1_it_is_one_process_on_all_data(keras_ranks):
    found = dict(keras_ranks[0]["keras_nodes.stock"])
    assert found.pop("a limit") > 1e-3
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


@pytest.mark.slow
def test_under_keras_a_resumed_run_is_the_uninterrupted_one():
    for rank in run_ranks(4, ["keras_state.resume"], "nodes", 500):
        for name, found in rank["keras_state.resume"].items():
            assert found["same"] == [True] * 3 and found["other"], name


@pytest.mark.slow
def test_what_is_owed_stays_from_nodes_to_other_numbers_of_ranks_and_back(tmp_path):
    before = None
    jobs = [(4, "nodes", "hierarchical"), (4, "gloo", "flat"), (2, "gloo", "flat"), (4, "nodes", "hierarchical")]
    for workers, controller, exchange in jobs:
        given = {"NODES_EXCHANGE": exchange}
        ranks = run_ranks(workers, ["nodes.saved"], controller, environment=given, folder=tmp_path)
        found = [rank["nodes.saved"] for rank in ranks]
        assert len({each["fingerprint"] for each in found}) == 1
        assert (found[0]["node size"] == 2) == (exchange == "hierarchical")
        if before is not None:
            assert found[0]["before"] == pytest.approx(before, rel=1e-5)
        before = found[0]["after"]
        assert all(abs(part) > 1e-3 for part in before)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["nodes.ends_later", "keras_nodes.ends_later"])
def test_a_node_that_has_ended_does_not_end_the_last_step_of_another(case):
    found = [rank[case]["fingerprint"] for rank in run_ranks(4, [case], "nodes")]
    assert len(found) == 4 and len(set(found)) == 1
