"""A checkpoint of a Keras job that is another one now: refused before anything is changed, or loaded."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.sealed import check_sealed

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    cases = ("refused", "within_an_accumulation", "outer_momentum", "sealed")
    return run_ranks(2, [f"keras_changed_state.{case}" for case in cases])


def test_what_is_refused_changes_nothing_and_is_loaded_behind_a_flush(ranks):
    found = [rank["keras_changed_state.refused"] for rank in ranks]
    assert found[0] == found[1]
    for name, error in found[0].pop("method").items():
        assert error.startswith("CheckpointError: the residuals hold gradients"), (name, error)
    for name, text in {
        "other layer": "a layer was frozen or thawed since they were saved",
        "Adam": "a layer was frozen or thawed since they were saved",
        "uncompressed": "nothing is compressed now: flush() before saving",
        "after steps": "those of model.weights at 0, 1, 4, 5 were trained, now those at 2, 3, 4, 5",
    }.items():
        run = found[0][name]
        assert text in run["error"] and run["same"], (name, run)
        assert run["flushed"] == "" and run["weights"], (name, run)


def test_what_was_changed_and_sealed_again_is_one_error_and_changes_nothing(ranks):
    check_sealed([rank["keras_changed_state.sealed"] for rank in ranks])


def test_a_load_within_an_accumulation_begins_it_anew(ranks):
    assert all(rank["keras_changed_state.within_an_accumulation"]["same"] for rank in ranks)


def test_outer_momentum_may_come_and_go(ranks):
    for found in (rank["keras_changed_state.outer_momentum"] for rank in ranks):
        assert len(found) == 4 and all(run == [True] * 3 for run in found.values()), found
