"""Keras' AdamW with a second moment that stays: what `test_frozen_adam` promises for PyTorch."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel


CASES = ["dense_steps", "faults", "handed_on", "misuse"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_frozen_adam.{case}" for case in CASES])


def test_dense_steps_are_those_of_one_process(ranks):
    found = [rank["keras_frozen_adam.dense_steps"] for rank in ranks]
    assert len({each["replica"] for each in found}) == 1 == len({each["second"] for each in found})
    for each in found:
        assert each["apart"] <= 1e-5
        assert sum(each["losses"][-3:]) < 0.9 * sum(each["losses"][:3])
        assert 0.98 < each["slots"] <= 1, "but for what was too small"


@pytest.mark.slow
def test_it_goes_on_bit_by_bit_where_it_was_stopped():
    for found in (rank["keras_frozen_adam.resume"] for rank in run_ranks(2, ["keras_frozen_adam.resume"])):
        assert len(found) == 3
        for half, (resumed, whole) in found.items():
            assert resumed == whole, half


def test_steps_that_are_not_finite_and_a_flush_leave_the_second_moment(ranks):
    found = [rank["keras_frozen_adam.faults"] for rank in ranks]
    for name in ("before", "flushed", "after"):
        assert len({each[name] for each in found}) == 1, name
    assert all(each["finite"] and each["same"] < 2e-7 and each["before"] != each["flushed"] for each in found)


def test_what_was_loaded_synced_or_given_fewer_variables_is_whole(ranks):
    found = [rank["keras_frozen_adam.handed_on"] for rank in ranks]
    assert len({each["replica"] for each in found}) == 1
    for each in found:
        assert each["same"] and all(loss < 1 for loss in each["losses"]), each
        assert 0.1 < each["moved"] < 10, "learning rates a step"


def test_a_second_moment_that_is_not_there_is_an_error_on_every_rank(ranks):
    for found in (rank["keras_frozen_adam.misuse"] for rank in ranks):
        assert "no second moment that could stay" in found["no state"], found
        assert "second_moment='frozen'" in found["own"], found


@pytest.mark.slow
def test_on_nodes_each_worker_keeps_its_part():
    found = [rank["keras_frozen_adam.nodes"] for rank in run_ranks(4, ["keras_frozen_adam.nodes"], "nodes", 300)]
    assert len({each["replica"] for each in found}) == 1
    for each in found:
        assert each["apart"] <= 1e-5 and each["kept"] == 11_264 // 2
        assert each["losses"][-1] < each["losses"][0]


@pytest.mark.slow
def test_dense_steps_end_once_it_has_settled():
    found = [rank["keras_frozen_adam.settled"] for rank in run_ranks(2, ["keras_frozen_adam.settled"])]
    assert found[0] == found[1]
    each = found[0]
    assert each["any"] == 40 < each["some"] == each["synced"]
    assert each["some, replica"] == each["by number"] == each["resumed"]
