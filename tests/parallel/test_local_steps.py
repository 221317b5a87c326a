"""Local steps keep their promises on real ranks: averaging at density 1, replicas, conservation, resumes, faults."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["averaging", "learning", "conservation", "faults", "misuse", "scaled"]
AROUND = ["loading", "freezing", "differing", "counting", "overflowing", "offloaded", "spoiled_gradient", "set_within",
          "handed_over", "counted_anew"]  # fmt: skip
H = 5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    around = [f"local_steps_around.{case}" for case in AROUND]
    cases = [*(f"local_steps.{case}" for case in CASES), *around]
    return run_ranks(2, cases, folder=tmp_path_factory.mktemp("ranks"), timeout=300)


def _found(ranks, case):
    return [rank[f"local_steps.{case}"] for rank in ranks]


def test_at_density_1_the_weights_become_their_mean(ranks):
    for found in _found(ranks, "averaging"):
        assert max(found.values()) <= 1e-5, found


def test_replicas_are_equal_after_each_exchange_and_only_then(ranks):
    one, other = _found(ranks, "learning")
    for i, (a, b) in enumerate(zip(one["after"], other["after"], strict=True)):
        assert (a == b) == (i % 2 == 1), i
    for found in (one, other):
        assert found["last"] < 0.5 * found["first"] and found["exchanges"] == 60
        assert found["fewer"] > 10 * H, "a tenth, in 2 bits, every fifth step"


def test_what_the_inner_steps_have_changed_is_applied_or_waits(ranks):
    for found in _found(ranks, "conservation"):
        assert found["apart"] <= 1e-4 and found["owed"] > 0.05
        assert found["flushed"] <= 1e-4 and found["changed"]


def test_weights_that_are_not_finite_move_nobody(ranks):
    found = _found(ranks, "faults")
    assert len({each["replica"] for each in found}) == 1
    assert all(each["stayed"] and each["moved"] and each["last"] < 10 for each in found), found


def test_what_cannot_be_is_said(ranks):
    for found in _found(ranks, "misuse"):
        assert "optimizer.exchange()" in found["residuals"] and found["then"] == ""
        assert "hvd.Average" in found["sum"]


def test_a_step_that_a_scaler_skips_on_one_rank_counts(ranks):
    found = _found(ranks, "scaled")
    assert len({each["replica"] for each in found}) == 1
    assert [each["exchanges"] for each in found] == [6, 6] and found[0]["scale"] != found[1]["scale"]
    assert all(each["last"] < each["first"] for each in found)


def test_a_state_that_is_loaded_or_broadcast_leaves_the_ranks_together(ranks):
    for found in (rank["local_steps_around.loading"] for rank in ranks):
        assert found["in a round"] == found["broadcast"] == 0
        assert "'nobody' fits no parameter of this optimizer" in found["alien"]


def test_a_frozen_layer_stays_and_a_thawed_one_is_refused(ranks):
    for found in (rank["local_steps_around.freezing"] for rank in ranks):
        assert found["moved"] < 1e-4 and "wrap the optimizer while it requires one" in found["thawed"]


def test_weights_that_differ_are_found_by_name_and_repaired(ranks):
    for found in (rank["local_steps_around.differing"] for rank in ranks):
        assert "'2.weight'" in found["stop"] and "more" not in found["stop"].split("differ")[0], found["stop"]
        assert found["broadcast"] == "" and found["repaired"] == [0, 0]  # weights, outer momentum


def test_an_overflow_on_one_rank_is_over_with_the_round(ranks):
    """Adam's first moment had stayed where the second was emptied: steps of 1e24."""
    for found in (rank["local_steps_around.overflowing"] for rank in ranks):
        assert found["apart"] == 0 and found["largest"] < 2


def test_host_memory_changes_nothing_on_a_cpu(ranks):
    for found in (rank["local_steps_around.offloaded"] for rank in ranks):
        assert found["same"] == [True, True] and found["kept"]


def test_rounds_that_end_early_count_as_they_are(ranks):
    for found in (rank["local_steps_around.counting"] for rank in ranks):
        assert found["dense"] == 1
        assert "wrapped again" in found["superseded"] or "UnsupportedUse" in found["superseded"], found
        assert "a whole number" in found["steps"]


def test_one_gradient_that_is_not_finite_costs_one_step_of_one_rank(ranks):
    """The weights of that rank had been NaN for a round, and its running statistics for ever."""
    for i, found in enumerate(rank["local_steps_around.spoiled_gradient"] for rank in ranks):
        error = found.pop("for long")
        assert found == {"spread": 0, "statistics": True, "skipped": 0, "moved": True, "left out": int(i == 1)}
        assert error.startswith("NotFinite: exchange 1: a weight was not finite on rank 1") and "2 in a row" in error


def test_weights_that_a_script_sets_within_a_round(ranks):
    one, other = (rank["local_steps_around.set_within"] for rank in ranks)
    for found in (one, other):
        assert found["plain"] > 0.01 and found["broadcast"] < 0.5 * found["plain"] and found["cleared"] == 0, found
    assert [one[f"{name}: said"] for name in ("plain", "broadcast", "cleared")] == [1, 0, 0]


def test_a_second_optimizer_begins_with_the_same_weights_on_every_rank(ranks):
    for found in (rank["local_steps_around.handed_over"] for rank in ranks):
        said = found.pop("kept by one rank")
        assert found == {"begun": 0, "ended": 0} and "(call exchange())" in said and "RankMismatch" in said


def test_steps_of_another_kind_of_run_are_not_counted_as_exchanges(ranks):
    for found in (rank["local_steps_around.counted_anew"] for rank in ranks):
        assert found == {"exchanges": 1, "step": 1, "spread": 0}


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(tmp_path):
    found = [rank["local_steps.resumed"] for rank in run_ranks(2, ["local_steps.resumed"], folder=tmp_path)]
    for name in ("AdamW", "SGD"):
        assert [each[name][:2] for each in found] == [[True, True]] * 2, name
        assert len({each[name][2] for each in found}) == 1
