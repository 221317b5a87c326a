"""The ranks compare their weights, and find out the one that differs."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, [f"checks.{case}" for case in ("drifting", "sound", "other_weights_from_the_start")])


def test_a_drifting_replica_stops_all_ranks_with_its_name(ranks):
    for rank in ranks:
        found = rank["checks.drifting"]["stop"]
        assert found["error"].startswith("after step 8 rank 1 has other weights than the others: '2.weight'. ")
        assert found["steps"] == 8, "it is found before the step after the comparison is applied"


def test_or_all_go_on_with_the_first_rank(ranks):
    found = [rank["checks.drifting"]["broadcast"] for rank in ranks]
    assert [each["steps"] for each in found] == [12] * 3
    assert len({each["fingerprint"] for each in found}) == 1


def test_sound_replicas_are_not_disturbed(ranks):
    found = [rank["checks.sound"] for rank in ranks]
    assert len({each[every]["fingerprint"] for each in found for every in "01"}) == 1


def test_weights_that_nobody_has_broadcast_are_found_at_once(ranks):
    for rank in ranks:
        error = rank["checks.other_weights_from_the_start"]["error"]
        assert "after step 1 rank" in error and "Broadcast parameters" in error
