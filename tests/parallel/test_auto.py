"""Compression.auto on real ranks: stock Horovod to the bit, switches that lose nothing, one choice for all."""

from __future__ import annotations

import itertools

import pytest

from dgc_horovod.planning.trial import COMPRESSED, DENSE, GAIN, SETTLING, TIMED
from dgc_horovod.state.residual_state import EARLIER_FP16
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.ranks(2, last=2)]
CASES = (
    *("dense_steps", "script_clipping", "switching", "conservation"),
    *("choosing", "resuming", "uneven", "refused"),
    *("given_up", "beside", "loading", "channels_last"),
)


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"auto.{case}" for case in CASES], timeout=300, last=True)


def _found(ranks, case):
    return [rank[f"auto.{case}"] for rank in ranks]


def test_dense_steps_are_stock_horovods_bit_by_bit(ranks):
    for found in _found(ranks, "dense_steps"):
        assert found == {"SGD": True, "AdamW": True, "clip_norm": True}


def test_a_model_in_channels_last_begins_with_stock_horovod_too(ranks):
    """It ended in stock Horovod's error, "Tensor is required to be contiguous", where method dgc works."""
    one, other = _found(ranks, "channels_last")
    assert one == other and one[0] < 1e-3 and one[2]


def test_a_scripts_clipping_is_stocks_first_and_local_afterwards(ranks):
    one, other = _found(ranks, "script_clipping")
    left = [found.pop("momentum") for found in (one, other)]
    assert one == other and one["same"] and one["told"]
    assert min(left) > 0.4, "the first compressed step has scaled the momentum of the dense ones away"


def test_a_switch_changes_nothing_at_density_1(ranks):
    for found in _found(ranks, "switching"):
        assert found["SGD"] <= 1e-5 and found["AdamW"] <= 1e-5


def test_replicas_are_identical_after_every_step_of_every_switch(ranks):
    one, other = _found(ranks, "switching")
    for name in ("SGD", "AdamW"):
        assert one[f"{name}, replicas"] == other[f"{name}, replicas"]
        assert len(set(one[f"{name}, replicas"])) == len(one[f"{name}, replicas"])
        assert one[f"{name}, left"] == 0, "dense steps leave nothing behind"


def test_all_that_was_accumulated_is_applied_once_steps_are_dense_again(ranks):
    for found in _found(ranks, "conservation"):
        assert max(found.values()) <= 1e-6


def test_every_rank_comes_to_the_choice_that_the_clock_says(ranks):
    one, other = _found(ranks, "choosing")
    assert one == other
    assert one["ended"] and one["steps"] == one["stats"] == len(one["modes"])
    changes = [mode for mode, _ in itertools.groupby(one["modes"])]
    assert one["modes"][: SETTLING + TIMED] == [DENSE] * (SETTLING + TIMED) and set(changes) == set(one["seconds"])
    best = min(one["seconds"], key=one["seconds"].get)
    gains = one["seconds"][best] <= GAIN * one["seconds"][DENSE]
    assert one["modes"][-1] == (best if gains else DENSE)


def test_a_resumed_run_is_the_uninterrupted_one_in_each_state(ranks):
    one, other = _found(ranks, "resuming")
    assert one == other and len(one) == 6
    for name, (same, mode, _) in one.items():
        assert same and name.replace(EARLIER_FP16, DENSE).endswith(mode), name


def test_ranks_that_run_out_of_data_choose_alike(ranks):
    one, other = _found(ranks, "uneven")
    assert one == other
    assert one["None"] == [True, DENSE] and one[COMPRESSED] == [True, COMPRESSED]


def test_a_trial_that_cannot_end_leaves_stock_horovods_exchange(ranks):
    one, other = _found(ranks, "given_up")
    assert one == other
    assert one["join"] == [DENSE, True]


def test_what_cannot_be_compressed_is_left_to_stock_horovod(ranks):
    one, other = _found(ranks, "beside")
    assert one == other
    assert one["sparse"] == [DENSE, True, True] and one["dampening"][0] is False and one["gradients"]


def test_a_job_that_has_lost_residuals_goes_on_with_what_was_chosen(ranks):
    one, other = _found(ranks, "loading")
    assert one == other
    for mode in (DENSE, COMPRESSED):
        assert one[f"{mode}, ignored"] == one[f"{mode}, if sound"] == [mode, True]
    assert one["saving"] == one["trial"] == [DENSE, False], "a choice is made anew"


@pytest.mark.slow
def test_workers_of_nodes_switch_alike():
    ranks = run_ranks(4, ["auto.on_nodes"], fresh=True)  # it declares process sets
    found = _found(ranks, "on_nodes")
    assert all(each["replicas"] == found[0]["replicas"] for each in found)
    assert len(set(found[0]["replicas"])) == len(found[0]["replicas"])
    assert all(each["left"] == 0 for each in found), "dense steps leave nothing behind"


def test_what_does_not_go_together_is_refused(ranks):
    for found in _found(ranks, "refused"):
        assert (
            "threshold" in found["rule"] and "local_steps=4" in found["local"] and "Compression.auto" in found["total"]
        )


@pytest.mark.slow
def test_a_rank_that_stays_away_from_a_dense_step_is_an_error_not_a_hang(tmp_path):
    one, _ = run_ranks(2, ["auto.missing"], environment={"DGC_TIMEOUT": "12"}, fresh=True, folder=tmp_path)
    assert "waited 12 s for allreduce." in one["auto.missing"]["error"]
