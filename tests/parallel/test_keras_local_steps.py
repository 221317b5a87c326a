"""Local steps of Keras on real ranks: what `test_local_steps` promises for PyTorch."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
CASES = ["averaging", "learning", "faults", "resumed", "misuse"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_local_steps.{case}" for case in CASES])


def _found(ranks, case):
    return [rank[f"keras_local_steps.{case}"] for rank in ranks]


def test_at_density_1_the_weights_become_their_mean(ranks):
    for found in _found(ranks, "averaging"):
        assert max(found.values()) <= 1e-5, found


def test_replicas_are_equal_after_an_exchange_and_only_then(ranks):
    one, other = _found(ranks, "learning")
    for name in ("after", "early", "flushed"):
        assert one[name] == other[name], name
    assert one["within"] != other["within"] and one["early"] != one["flushed"]
    for found in (one, other):
        assert found["losses"][-1] < 0.5 * found["losses"][0] and found["exchanges"] == 40
        assert found["fewer"] > 10 * 4, "a tenth, in 2 bits, every fourth step"


def test_weights_that_are_not_finite_move_nobody(ranks):
    found = _found(ranks, "faults")
    assert len({each["replica"] for each in found}) == 1
    assert all(each["stayed"] and each["sound"] and each["last"] < 4 for each in found), found


def test_a_checkpoint_ends_the_round_and_keeps_what_waits(ranks):
    found = _found(ranks, "resumed")
    assert len({each["replica"] for each in found}) == 1 == len({each["saved"] for each in found})
    for each in found:
        assert each["saved"] == each["loaded"] and each["e"]
        assert each["losses"][-1] < each["losses"][0]


def test_what_cannot_be_is_said(ranks):
    for found in _found(ranks, "misuse"):
        assert "hvd.Average" in found["sum"] and "mixed_bfloat16" in found["scaled"]
        assert "DistributedOptimizer" in found["tape"]
