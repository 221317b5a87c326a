"""What is not finite on one rank reaches nothing, and costs that step alone."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.parallel.cases.faults import BAD, STEPS

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(4, ["faults.not_finite", "faults.stops"])


def test_a_job_that_is_to_stop_stops_on_every_rank_with_the_culprit(ranks):
    found = [rank["faults.stops"] for rank in ranks]
    assert all(each == found[0] for each in found) and found[0]["step"] == 7
    assert found[0]["error"].startswith("step 7: a gradient was not finite on rank 1, among '2.weight'; ")


def test_after_a_gradient_that_is_not_finite_the_run_is_that_of_the_reference(ranks):
    ranks = [rank["faults.not_finite"] for rank in ranks]
    for kind in BAD:
        assert len({rank[kind]["fingerprint"] for rank in ranks}) == 1
        for rank in ranks:
            found = rank[kind]
            assert found["finite"]
            assert found["same"] == [True] * (1 + STEPS - found["at"][0]), f"{kind}: weights, u or v differ"
