"""Weights that are loaded in the middle of a run have nothing to do with what ranks had kept for those before."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
CASES = ["between_steps", "checkpointed", "one_rank", "set_weights", "back_by_one"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_reloaded.{case}" for case in CASES], timeout=400)


def _found(ranks, case):
    return [rank[f"keras_reloaded.{case}"] for rank in ranks]


def test_what_was_loaded_is_saved_and_not_flushed_away(ranks):
    """A flush had moved the loaded weights, and files had had the velocity of the weights before."""
    first, second = _found(ranks, "between_steps")
    assert set(first) == {"dgc", "topk", "adam", "scaled", "local"}
    for rank, found in enumerate((first, second)):
        for way, of in found.items():
            assert of["waited"] > 0 and of["left"] == 0, way
            assert of["file"] == of["moved"] == of["slots"] == 0, (way, of)
            assert of["said"] == (rank == 0), (way, of)
            assert of["after"] == first[way]["after"], way


def test_what_was_loaded_is_what_a_checkpoint_has(ranks):
    """It had had what waited for the weights before; what load_checkpoint brings later is not touched."""
    first, second = _found(ranks, "checkpointed")
    for found in (first, second):
        assert found["brought"] == 1 and found["before the first step"] == found["saved"] == 0, found
        assert found["alike"], "resumed from the checkpoint it is another run"


def test_one_rank_may_load_for_all(ranks):
    """What the others had kept had gone into the weights that were sent to them."""
    first, second = _found(ranks, "one_rank")
    assert first == second and first["error"] == "" and first["moved"] == 0


def test_slots_that_are_set_are_taken_over(ranks):
    """They had stayed where they were, of no effect."""
    for found in _found(ranks, "set_weights"):
        for way in ("dgc", "adam", "scaled"):
            assert found[way] == {"left": 0, "same": True, "slots": 0}, way
        assert found["local"]["left"] == 0 and found["local"]["same"] and found["local"]["slots"] > 0


def test_weights_of_one_step_ago_are_noticed(ranks):
    """What the dropped step had left had been applied to them."""
    for rank, found in enumerate(_found(ranks, "back_by_one")):
        for way in ("dgc", "adam"):
            assert found[way] == [0, 0, rank == 0], found
        assert found["topk"][1:] == [0, rank == 0] and found["auto"] == [0, 0, 0]
