"""What ranks have kept beside a Keras model survives a restart and a change of their number: on real ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_state.{case}" for case in ("resume", "flushed", "flush_is_linear", "errors")])


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(ranks):
    _check_resumed([rank["keras_state.resume"] for rank in ranks], 2)


@pytest.mark.slow
def test_with_every_method_and_optimizer():
    _check_resumed([rank["keras_state.resume_others"] for rank in run_ranks(2, ["keras_state.resume_others"])], 7)


def _check_resumed(found, runs):
    assert len(found[0]) == runs
    for name, run in found[0].items():
        assert run["same"] == [True] * 3, name
        assert run["extra"] == {"epoch": 1}
        assert run["other"], f"{name}: without its residuals the run is the same, so this shows nothing"
        assert run["fingerprint"] == found[1][name]["fingerprint"]
        assert "AdamW" not in name or "topk" in name or run["rate"] == pytest.approx(run["last rate"], rel=1e-6)


def test_a_flush_leaves_nothing_and_loses_nothing(ranks):
    found = [rank["keras_state.flushed"] for rank in ranks]
    assert len(found[0]) == 6
    for name, run in found[0].items():
        assert run["worst"] < 1e-5, f"{name}: the weights have not moved by what was owed"
        assert run["left"] == 0 and run["finite"] and run["slots"] > 0, (name, run)
        assert run["fingerprint"] == found[1][name]["fingerprint"]


def test_a_flush_moves_momentum_and_changes_nothing_else(ranks):
    found = ranks[0]["keras_state.flush_is_linear"]
    assert len(found) == 2 and all(distance < 1e-5 for distance in found.values()), found


@pytest.mark.slow
def test_a_run_that_was_flushed_and_saved_is_resumed_bit_by_bit():
    for rank in run_ranks(2, ["keras_state.saved_after_a_flush"]):
        assert rank["keras_state.saved_after_a_flush"] == {"SGD": True, "Nesterov, decay": True, "AdamW": True}


def test_errors_are_the_same_on_every_rank(ranks):
    found = [rank["keras_state.errors"] for rank in ranks]
    assert found[0] == found[1]
    for name, text in {
        "other model": "another model",
        "other method": "momentum_correction",
        "missing": "rank 1: ",
        "no name": "rank 1: the directory must be a path, got ''",
        "no dict": "this is no dict of residual_state_dict()",
    }.items():
        assert found[0][name].startswith("CheckpointError: ") and text in found[0][name], found[0][name]
    assert "must be numbers, texts" in found[0]["extra"]
    assert found[0]["not distributed"].startswith("UnsupportedUse: ")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_another_number_of_ranks_owes_the_same(before, after, tmp_path):
    saved = run_ranks(before, ["keras_state.save_for_others"], folder=tmp_path)
    loaded = run_ranks(after, ["keras_state.load_of_others"], folder=tmp_path)
    assert len({rank["keras_state.load_of_others"]["fingerprint"] for rank in loaded}) == 1
    old = [rank["keras_state.save_for_others"]["state"] for rank in saved]
    new = [rank["keras_state.load_of_others"]["state"] for rank in loaded]
    for name in old[0]:
        for part in old[0][name]:
            means = [np.mean([state[name][part] for state in states], axis=0) for states in (old, new)]
            np.testing.assert_allclose(means[1], means[0], rtol=1e-5, atol=1e-6 * max(np.abs(means[0]).max(), 1e-9))
