"""What ranks have kept survives a restart and a change of their number, and can be emptied: on real ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.interrupted import COMPRESSIONS, OPTIMIZERS
from tests.helpers.ranks import run_ranks
from tests.helpers.sealed import check_sealed

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(
        2,
        [
            "state.resume",
            "state.flushed",
            "damaged_state.damage",
            "damaged_state.sealed",
            "damaged_state.particular",
            "state.stock_and_back",
            "state.to_the_dense_path",
            "state.flush_is_linear",
            "state.adam_after_a_flush",
            "state.elastic_state",
        ],
    )


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(ranks):
    found = [rank["state.resume"] for rank in ranks]
    assert len(found[0]) == len(COMPRESSIONS) + len(OPTIMIZERS)
    for name, run in found[0].items():
        _check_resumed(name, run, found[1][name])


@pytest.mark.slow
def test_a_run_that_is_resumed_late_is_the_uninterrupted_one():
    one, other = (rank["state.resume_late"] for rank in run_ranks(2, ["state.resume_late"]))
    _check_resumed("200 steps", one, other)


def _check_resumed(name, one, other):
    assert one["same"] == [True, True], name
    assert one["extra"] == {"epoch": 3}
    assert one["other"], f"{name}: without its residuals the run is the same, so this shows nothing"
    assert one["fingerprint"] == other["fingerprint"]


def test_what_coding_has_left_of_small_tensors_goes_with_the_first_dense_step(ranks):
    for rank in ranks:
        found = rank["state.to_the_dense_path"]
        assert found["kept"] and found["owed"] > 0 and found["worst"] < 1e-3, found  # of differences of fp32 weights


@pytest.mark.parametrize(
    ("before", "after"), [(2, 1), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((4, 2), (2, 3), (2, 4)))]
)
def test_another_number_of_ranks_owes_the_same(before, after, tmp_path):
    saved = run_ranks(before, ["state.save_for_others"], folder=tmp_path)[0]["state.save_for_others"]["states"]
    loaded = run_ranks(after, ["state.load_of_others"], folder=tmp_path)
    found = [rank["state.load_of_others"] for rank in loaded]
    assert len({rank["fingerprint"] for rank in found}) == 1
    now = found[0]["states"]
    assert len(saved) == before and len(now) == after
    assert all(np.any(arrays["v"]) for state in saved for name, arrays in state.items() if name.endswith("weight"))
    for name in saved[0]:
        for part in saved[0][name]:
            old, new = (np.array([state[name][part] for state in states], np.float32) for states in (saved, now))
            np.testing.assert_allclose(new.mean(0), old.mean(0), rtol=1e-5, atol=1e-6 * np.abs(old).max())
            if before == 2 * after:
                np.testing.assert_array_equal(new, np.float32(0.5) * old[::2] + np.float32(0.5) * old[1::2])
            elif after == 2 * before:
                np.testing.assert_array_equal(new, np.repeat(old, 2, axis=0))


def test_a_flush_leaves_nothing_and_loses_nothing(ranks):
    found = [rank["state.flushed"] for rank in ranks]
    assert len(found[0]) == 2 * len(OPTIMIZERS)
    for name, run in found[0].items():
        assert run["worst"] < 1e-5, f"{name}: the weights have not moved by what was owed"
        assert run["left"] == 0 and run["finite"] and run["momentum"], (name, run)
        assert run["fingerprint"] == found[1][name]["fingerprint"]


def test_adam_goes_on_after_a_flush_with_the_moments_it_had(ranks):
    for found in (rank["state.adam_after_a_flush"] for rank in ranks):
        assert 0.9 < found["kept"] < 1.2 and found["steps"] == 31


def test_a_flush_moves_momentum_and_changes_nothing_else(ranks):
    found = ranks[0]["state.flush_is_linear"]
    assert len(found) == 3 and all(distance < 1e-5 for distance in found.values()), found


def test_what_was_changed_and_sealed_again_is_one_error_and_changes_nothing(ranks):
    check_sealed([rank["damaged_state.sealed"] for rank in ranks])


def test_a_model_is_loaded_by_its_own_hooks_once_or_is_what_it_was(ranks):
    for found in (rank["damaged_state.particular"] for rank in ranks):
        assert "rank 1" in found["error"] and "not mine" in found["error"], found
        assert found["same"] and found["loaded"] and found["seen"] == 3, found


def test_damage_is_one_error_on_every_rank_or_a_choice(ranks):
    found = [rank["damaged_state.damage"] for rank in ranks]
    for name in (
        "missing",
        "cut",
        "changed",
        "other method",
        "other model",
        "other op",
        "something else's",
        "not writable",
        "code",
        "another optimizer",
        "no name",
        "a long name",
        "no name to load",
    ):
        assert found[0][name].startswith("CheckpointError: "), (name, found[0][name])
        assert found[0][name].split("failed; ")[1] == found[1][name].split("failed; ")[1], name
    assert "rank 1: " in found[0]["missing"] and 'residuals="if sound"' in found[0]["missing"]
    for name in ("missing", "cut", "changed"):
        assert [rank[f"{name}, skipped"] for rank in found] == [True, False], "the damaged rank alone starts from zero"
    assert "averaging" in found[0]["other op"] and "summing" in found[0]["other op"]
    assert found[0]["stale"].startswith("CheckpointError: the residuals are of rank 1 of 2")
    assert "rank 1: the directory must be a path, got ''" in found[0]["no name"]
    assert found[0]["no dict"].startswith("CheckpointError: this is no dict of residual_state_dict()")
    assert found[0]["in flight"].startswith("CheckpointError: ") and found[0]["not applied"].startswith(
        "UnsupportedUse: "
    )
    assert all("after step()" in found[0][name] for name in ("in flight", "not applied"))
    assert found[0]["files"] == ["manifest.json", "model.bin", "rank0.npz", "rank1.npz"], (
        "the first save is still there"
    )


def test_a_commit_that_flushes_and_ranks_that_meet(ranks):
    found = [rank["state.elastic_state"] for rank in ranks]
    assert found[0] == found[1] and found[0]["flushed"] == [True] * 4
    assert (
        found[0]["disagree"].startswith("RankMismatch: ") and "rank 0 has 0.01, rank 1 has 0.02" in found[0]["disagree"]
    )


def test_stock_checkpoints_go_both_ways(ranks):
    for rank in ranks:
        assert rank["state.stock_and_back"] == {"same": True, "extra": {"epoch": 1}, "back": True}
