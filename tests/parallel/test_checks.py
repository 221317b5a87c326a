"""The ranks compare their weights, and find out the one that differs."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.ranks(3)]
CASES = [
    "drifting", "sound", "other_weights_from_the_start", "repaired_in_time", "another_state_on_rank_zero",
    "elastic_script_of_fixed_ranks", "why_different",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, [f"checks.{case}" for case in CASES])


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
    assert len({each[every] for each in found for every in "01"}) == 1


def test_weights_that_nobody_has_broadcast_are_found_at_once(ranks):
    for rank in ranks:
        error = rank["checks.other_weights_from_the_start"]["error"]
        assert "after step 1 rank" in error
        assert "differed before the first step was applied. Broadcast weights" in error and "max_norm" not in error


def test_the_cause_of_a_difference_is_named_where_it_can_be_known(ranks):
    """Every message said that weights were to be broadcast, which cures none of these."""
    found = [rank["checks.why_different"] for rank in ranks]
    assert found[0] == found[1] == found[2]
    assert "The lr of parameter group 0 is 0.1 on rank 0 and 0.025 on rank 2. Give" in found[0]["rate"]
    assert "The loss scale is 3.0 on rank 0 and 1000.0 on rank 1. Give" in found[0]["scale"]
    assert "'table.weight'. 'table.weight' belongs to an Embedding with max_norm" in found[0]["embedding"]
    assert not any("Broadcast" in text for text in found[0].values())
    drifted = ranks[0]["checks.drifting"]["stop"]["error"]
    assert "They were equal after step 4. The optimizer's options (learning rate, ...) are the same" in drifted
    assert "max_norm" in drifted and "Broadcast" not in drifted


def test_weights_that_the_script_has_set_right_are_right(ranks):
    assert len({rank["checks.repaired_in_time"]["fingerprint"] for rank in ranks}) == 1


def test_the_first_rank_gives_its_optimizer_state_too(ranks):
    found = [rank["checks.another_state_on_rank_zero"] for rank in ranks]
    assert all(found[0] == each for each in found) and len(found[0]) == 2


def test_an_elastic_script_runs_with_a_fixed_number_of_ranks(ranks):
    found = [rank["checks.elastic_script_of_fixed_ranks"] for rank in ranks]
    assert all(each == found[0] for each in found)
    assert found[0]["restored"] and found[0]["batch"] == 4, "what was committed before the last increment"
