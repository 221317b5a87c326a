"""The ranks of a Keras job compare their weights, and find out the one that differs."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(
        3, ["keras_checks.in_a_loop", "keras_checks.drifting", "keras_checks.for_long", "keras_checks.why_different"]
    )


def test_a_drifting_replica_stops_all_ranks_with_its_name(ranks):
    for rank in ranks:
        found = rank["keras_checks.in_a_loop"]
        assert found["error"].startswith("after step 4 rank 2 has other weights than the others: '")
        assert "dense_2/kernel" in found["error"] and found["step"] == 4
        assert "after step 8 rank 1 has other weights than the others" in rank["keras_checks.drifting"]["fit"]


def test_or_all_go_on_with_the_first_rank(ranks):
    found = [rank["keras_checks.drifting"] for rank in ranks]
    for name in ("SGD", "Adam"):
        assert all(each[name] == found[0][name] for each in found), name
    assert any(found[0]["Adam"][1])


def test_sound_replicas_are_not_disturbed(ranks):
    assert len({text for rank in ranks for text in rank["keras_checks.drifting"]["sound"]}) == 1


def test_many_skipped_steps_are_told_again_and_end_in_an_error_on_every_rank(ranks):
    for i, rank in enumerate(ranks):
        found = rank["keras_checks.for_long"]
        assert (found["steps"], found["skipped"]) == (8 + 11, 11)
        assert "step 18: a gradient was not finite on rank 1" in found["error"] and "11 in a row" in found["error"]
        assert len(found["said"]) == 2 * (i == 0)
    assert ranks[0]["keras_checks.for_long"]["said"][1].endswith("skipped 10 of the last 10 steps")


def test_another_learning_rate_on_one_rank_is_named(ranks):
    """The message said that weights were to be broadcast."""
    for rank in ranks:
        error = rank["keras_checks.why_different"]
        assert "after step 6 rank 2 has other weights" in error and "Broadcast" not in error
        assert "The learning rate is 0.05 on rank 0 and 0.0125 on rank 2" in error
