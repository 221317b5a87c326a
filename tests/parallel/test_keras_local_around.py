"""Around Keras' local steps the ranks stay together, on real ranks: what `test_local_steps` promises for PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
H = 4
CASES = [
    "accumulating", "beginning", "loading", "freezing", "overflowing", "options", "repairing", "own", "refused",
    "spoiled_gradient", "exported",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_local_around.{case}" for case in CASES], timeout=400)


def _found(ranks, case):
    return [rank[f"keras_local_around.{case}"] for rank in ranks]


def test_accumulated_passes_are_one_step(ranks):
    """A round had lasted H steps of H passes, and each pass of the step that ended it had been an exchange."""
    for found in _found(ranks, "accumulating"):
        assert found["exchanged"] == [0] * (2 * H - 1) + [1] * 2 * H + [2]
        assert found["dense"] == 2 * H and found["flush"] == "" and found["apart"] == 0


def test_a_broadcast_after_the_first_step_leaves_the_ranks_together(ranks):
    """Each rank had gone on from weights of its own."""
    assert _found(ranks, "beginning") == [{"loop": 0, "fit": 0}] * 2


def test_weights_loaded_in_a_round_are_gone_on_with(ranks):
    """Where one rank had loaded, outer momentum and the round's begin were its own."""
    assert _found(ranks, "loading") == [{"kept": 0, "one rank": 0, "set": 0}] * 2


def test_a_frozen_layer_stays_and_sets_of_variables_may_take_turns(ranks):
    for found in _found(ranks, "freezing"):
        assert found["moved"] == found["apart"] == found["turns"] == 0 < found["changed"]


def test_an_overflow_on_one_rank_is_over_with_the_round(ranks):
    """Adam's first moment had stayed where the second was emptied: steps of 1e24."""
    for found in _found(ranks, "overflowing"):
        assert found["apart"] == 0 and found["largest"] < 2


def test_one_gradient_that_is_not_finite_costs_one_step_of_one_rank(ranks):
    found = _found(ranks, "spoiled_gradient")
    assert [each.pop("left out") for each in found] == [0, 1]
    assert found == [{"sound": True, "apart": 0, "skipped": 0}] * 2


def test_what_was_loaded_is_flushed_before_the_first_step_with_a_layer_frozen_since(ranks):
    assert _found(ranks, "exported") == [{"flushed": ""}] * 2


def test_what_is_the_inner_optimizers_acts_as_in_keras(ranks):
    for found in _found(ranks, "options"):
        assert found["norm"] < 1e-5 and found["clipped"] == pytest.approx(1e-3) and found["velocity"] < 1
        assert found["velocity"] == pytest.approx(0.5) and found["in a graph"] == 0 < found["within"]


def test_weights_that_differ_are_found_and_repaired(ranks):
    for found in _found(ranks, "repairing"):
        assert found["broadcast"] == "" and found["apart"] == 0 and "different weights" in found["stop"], found


def test_variables_of_each_rank_alone_are_not_exchanged(ranks):
    for found in _found(ranks, "own"):
        assert found["exchange"] == "" and found["apart"] > 0


def test_what_cannot_be_is_said(ranks):
    for found in _found(ranks, "refused"):
        assert "use_ema" in found["average"] and "before the first step" in found["late"]
        assert "optimizer.exchange()" in found["in a round"] and found["after it"] == ""
        assert "mixed_bfloat16" in found["float16"]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(tmp_path):
    found = [
        rank["keras_local_around.resumed"] for rank in run_ranks(2, ["keras_local_around.resumed"], folder=tmp_path)
    ]
    for name in ("AdamW", "SGD"):
        assert [each[name][:2] for each in found] == [[1, 1]] * 2, name


@pytest.mark.slow
def test_a_rank_with_fewer_steps_is_told():
    first, second = run_ranks(2, ["keras_local_around.missing"], environment={"DGC_TIMEOUT": "5"}, fresh=True)
    first, second = first["keras_local_around.missing"], second["keras_local_around.missing"]
    assert first["said"].startswith("CollectiveTimeout: rank 0 of 2 waited 5 s")
    assert "Horovod has" in second["said"]
