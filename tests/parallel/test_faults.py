"""What is not finite on one rank reaches nothing, and costs that step alone."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.parallel.cases.faults import BAD, STEPS

pytestmark = pytest.mark.parallel


def test_after_a_gradient_that_is_not_finite_the_run_is_that_of_the_reference():
    ranks = [rank["faults.not_finite"] for rank in run_ranks(4, ["faults.not_finite"])]
    for kind in BAD:
        assert len({rank[kind]["fingerprint"] for rank in ranks}) == 1
        for rank in ranks:
            found = rank[kind]
            assert found["finite"]
            assert found["same"] == [True] * (1 + STEPS - found["at"][0]), f"{kind}: weights, u or v differ"
