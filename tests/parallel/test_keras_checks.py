"""The ranks of a Keras job compare their weights, and find out the one that differs."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, ["keras_checks.in_a_loop", "keras_checks.drifting"])


def test_a_drifting_replica_stops_all_ranks_with_its_name(ranks):
    for rank in ranks:
        found = rank["keras_checks.in_a_loop"]
        assert found["error"].startswith("after step 4 rank 2 has other weights than the others: '")
        assert "dense_2/kernel" in found["error"] and found["step"] == 4
        assert "after step 8 rank 1 has other weights than the others" in rank["keras_checks.drifting"]["fit"]


def test_or_all_go_on_with_the_first_rank(ranks):
    found = [rank["keras_checks.drifting"] for rank in ranks]
    for name in ("SGD", "Adam"):
        assert len({each[name] for each in found}) == 1


def test_sound_replicas_are_not_disturbed(ranks):
    assert len({text for rank in ranks for text in rank["keras_checks.drifting"]["sound"]}) == 1
