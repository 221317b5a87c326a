"""Keras' local steps under elastic state: what a commit keeps, what a meeting loses."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
CASES = ["going_back", "broken_off", "meeting", "newcomer", "renewed", "flushed"]


@pytest.fixture(scope="module")
def ranks():
    found = run_ranks(2, [f"keras_local_elastic.{case}" for case in CASES], timeout=400)
    return {case: [rank[f"keras_local_elastic.{case}"] for rank in found] for case in CASES}


def test_a_commit_is_gone_back_to_bit_for_bit_within_a_round_too(ranks):
    for found in ranks["going_back"]:
        assert len(found) == 6 and all(each == [True, True] for each in found.values()), found


def test_an_exchange_that_is_broken_off_does_not_touch_the_weights_of_the_commit(ranks):
    for found in ranks["broken_off"]:
        assert "a worker has left" in found["failed"] and found["same"] and found["calls"] == 2
        assert found["spread"] == 0 and found["left"] == 0


def test_ranks_that_meet_within_a_round_go_on_from_rank_0_and_keep_what_is_their_own(ranks):
    for name in ("AdamW", "SGD"):
        for found in (rank[name] for rank in ranks["meeting"]):
            assert found["apart"] > 0 and found["spread"] == 0 and found["rank 0's"] and found["calls"] == 0
            assert found["kept"] and found["differ"] == 2 and found["outer"] and found["then"] == 0


def test_a_newcomer_takes_over_the_inner_optimizer_of_rank_0(ranks):
    for name in ("AdamW", "SGD"):
        one, other = (rank[name] for rank in ranks["newcomer"])
        assert one["as before"] and not other["as before"]
        for found in (one, other):
            assert found["alike"] == 1 and set(found["momentum"]) == {1.0} and found["iterations"] == 2
            assert found["then"] == 0


def test_a_round_goes_on_where_the_exchange_is_made_anew_within_it(ranks):
    assert all(found["same"] for found in ranks["renewed"])


def test_a_commit_that_flushes_ends_the_round(ranks):
    for found in ranks["flushed"]:
        assert not found["left"] and found["spread"] == 0 and found["idle"] and found["again"] == 0
