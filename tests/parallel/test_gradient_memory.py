"""Updates are put together where gradients are, and nothing that shares their memory is harmed by it."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["update_in_place", "replaced_gradients", "shared_gradient_memory", "still_needed", "which_are_alone"]
CASES += ["late_writes", "other_backend"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"gradient_memory.{case}" for case in CASES])


def test_updates_are_put_together_in_the_gradients_memory(ranks):
    found = ranks[0]["gradient_memory.update_in_place"]
    assert found["fp32"] == {"in place": True, "held": 0} and found["bf16"]["held"] == 0


def test_gradients_that_a_script_replaced_still_get_the_update(ranks):
    found = [rank["gradient_memory.replaced_gradients"] for rank in ranks]
    assert found[0]["same"] and found[0]["fingerprint"] == found[1]["fingerprint"]


def test_gradients_that_share_memory_get_an_update_each(ranks):
    found = [rank["gradient_memory.shared_gradient_memory"] for rank in ranks]
    assert found[0]["fp32"]["shared"], "autograd no longer shares this memory; find another case"
    for way, most in (("fp32", 1e-6), ("8bit", 2e-2), ("two buckets", 1e-6)):
        assert found[0][way]["distance"] < most
        assert found[0][way]["fingerprint"] == found[1][way]["fingerprint"]


def test_memory_that_the_backward_pass_still_needs_is_left_alone(ranks):
    for found in (rank["gradient_memory.still_needed"] for rank in ranks):
        assert found["alone"]["a"] == [False] * 5, "autograd no longer hands on this memory; find another case"
        assert found["alone"]["b"] == [True] * 5
        assert found["distance"] < 1e-6


def test_which_gradients_are_alone(ranks):
    assert ranks[0]["gradient_memory.which_are_alone"] == [False, False, False, True]


def test_what_a_script_writes_too_late_reaches_no_weight(ranks):
    found = [rank["gradient_memory.late_writes"] for rank in ranks]
    assert found[0]["zeros"] > 0, "no gradient was zeroed while it was taken in: this tests nothing"
    prints = {(name, text) for rank in found for name, text in rank["prints"].items()}
    assert len({text for _, text in prints}) == 1, prints


def test_kernels_that_leave_gradients_alone(ranks):
    for found in (rank["gradient_memory.other_backend"] for rank in ranks):
        assert found == {"same": True, "told": []}
