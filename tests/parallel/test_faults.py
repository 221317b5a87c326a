"""What is not finite on one rank reaches nothing, and costs that step alone."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.parallel.cases.faults import BAD, STEPS

pytestmark = [pytest.mark.parallel, pytest.mark.ranks(3)]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, ["faults.not_finite", "faults.stops", "faults.for_long", "faults.spoilt_weights"])


def test_a_job_that_is_to_stop_stops_on_every_rank_with_the_culprit(ranks):
    found = [rank["faults.stops"] for rank in ranks]
    assert all(each == found[0] for each in found) and found[0]["step"] == 7
    assert found[0]["error"].startswith("step 7: a gradient was not finite on rank 1, among '2.weight'; ")


def test_weights_that_are_not_finite_are_named(ranks):
    """Gradients were blamed, and every step was skipped to the end."""
    for rank, found in enumerate(rank["faults.spoilt_weights"] for rank in ranks):
        assert found["made"].startswith("NotFinite: step 0: Dividing has made the weights of '0.weight' that are not")
        assert found["had"].startswith("NotFinite: step 0: the weights of '2.weight' are not finite, and so gradients")
        assert f"the weights of '2.weight' are not finite on rank {rank}, and so gradients" in found["local"]


def test_after_a_gradient_that_is_not_finite_the_run_is_that_of_the_reference(ranks):
    ranks = [rank["faults.not_finite"] for rank in ranks]
    for kind in BAD:
        assert len({rank[kind]["fingerprint"] for rank in ranks}) == 1
        for rank in ranks:
            found = rank[kind]
            assert found["finite"]
            assert found["same"] == [True] * (1 + STEPS - found["at"][0]), f"{kind}: weights, u or v differ"


def test_many_skipped_steps_are_told_again_and_end_in_an_error_on_every_rank(ranks):
    """80 of 90 steps were skipped, with one line at the first of them."""
    found = [rank["faults.for_long"] for rank in ranks]
    assert all(each["stops"] == found[0]["stops"] and each["skips"] == 14 for each in found)
    step, error = found[0]["stops"]
    assert step == 17 and error.startswith(
        "NotFinite: step 17: a gradient was not finite on rank 1, among '2.weight'; "
    )
    assert "12 in a row were skipped" in error and "--dgc-max-skipped" in error
    first, tenth = found[0]["said"]
    assert first.endswith("every rank skips the step") and "skipped" not in first
    assert "step 13: " in tenth and tenth.endswith("; skipped 10 of the last 11 steps")
    assert not any(each["said"] for each in found[1:]), "rank 0 tells for all"


def test_under_a_grad_scaler_nothing_stops_and_what_is_unusual_is_told(ranks):
    for i, rank in enumerate(ranks):
        skipped, scale, said = rank["faults.for_long"]["scaled"]
        assert skipped == STEPS and scale == 2.0 ** (20 - STEPS) and len(said) == 2 * (i == 0)
