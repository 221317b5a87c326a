"""Uneven data with local steps: ranks that have finished are in join() while the others go on."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["averaging", "around", "beside_another", "at_once"]


@pytest.fixture(scope="module")
def ranks():
    found = run_ranks(3, [f"local_steps_join.{case}" for case in CASES], fresh=True, timeout=300)
    return {case: [rank[f"local_steps_join.{case}"] for rank in found] for case in CASES}


def test_every_exchange_is_the_mean_of_all_ranks_weights(ranks):
    found = ranks["averaging"]
    assert len({each["replica"] for each in found}) == 1
    for each in found:
        assert each["apart"] <= 1e-5 and each["last"] == 1 and each["own"], each
        assert each["exchanges"] == 4 and each["in the round"] == 0, "three full rounds, and the end of join"


def test_epochs_schedules_and_an_exchange_that_is_not_finite(ranks):
    one, *others = ranks["around"]
    assert all(each["ends"] == one["ends"] for each in others)
    assert [end[:2] for end in one["ends"]] == [[1, True]] * 2
    assert all(each["finite"] and each["skipped"] == 2 for each in ranks["around"])


def test_beside_an_optimizer_that_exchanges_at_each_step(ranks):
    one, *others = ranks["beside_another"]
    assert all(each == one for each in others)
    assert one["last"] == 1 and one["steps"] == [4, 15]


def test_a_join_of_all_at_once_is_an_exchange(ranks):
    for found in ranks["at_once"]:
        assert found["ends"][0] == found["ends"][1]
