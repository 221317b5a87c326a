"""Updates are put together where gradients are, and nothing that shares their memory is harmed by it."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["update_in_place", "replaced_gradients", "shared_gradient_memory", "late_writes"]


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


def test_what_a_script_writes_too_late_reaches_no_weight(ranks):
    found = [rank["gradient_memory.late_writes"] for rank in ranks]
    prints = {(name, text) for rank in found for name, text in rank.items()}
    assert len({text for _, text in prints}) == 1, prints
