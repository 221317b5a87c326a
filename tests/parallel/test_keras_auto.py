"""Compression.auto in Keras on real ranks: the uncompressed exchange to the bit, switches that lose nothing."""

from __future__ import annotations

import functools
import itertools

import pytest

from dgc_horovod.planning.trial import DENSE, GAIN, SETTLING, TIMED
from dgc_horovod.state.residual_state import EARLIER_FP16
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@functools.cache
def _found(case):
    """What each of two ranks found; a case at a time, since all of them together take longer than a test may."""
    return [rank[case] for rank in run_ranks(2, [case])]


@pytest.mark.slow
def test_dense_steps_are_those_of_the_uncompressed_exchange_bit_by_bit():
    for found in _found("keras_auto.dense_steps"):
        assert all(found.values()), found


def test_a_switch_changes_nothing_at_density_1():
    for found in _found("keras_auto.switching"):
        assert found["distance"] <= 1e-5


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_replicas_are_identical_after_every_step_of_every_switch(name):
    one, other = _found("keras_auto.switching")
    assert one[name] == other[name] and len(set(one[name])) == len(one[name])
    assert one[f"{name}, left"] == 0, "dense steps leave nothing behind"
    assert one[f"{name}, finite"]


@pytest.mark.slow
def test_all_that_was_accumulated_is_applied_once_steps_are_dense_again():
    for found in _found("keras_auto.conservation"):
        assert max(found.values()) <= 1e-6


def test_every_rank_comes_to_the_choice_that_the_clock_says():
    one, other = _found("keras_auto_choice.choosing")
    assert one == other
    assert one["ended"] and one["steps"] == one["stats"] == len(one["modes"]) + 1
    changes = [mode for mode, _ in itertools.groupby(one["modes"])]
    assert one["modes"][: SETTLING + TIMED] == [DENSE] * (SETTLING + TIMED) and set(changes) <= set(one["seconds"])
    best = min(one["seconds"], key=one["seconds"].get)
    gains = one["seconds"][best] <= GAIN * one["seconds"][DENSE]
    assert one["mode"] == one["modes"][-1] == (best if gains else DENSE)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_in_each_state():
    one, other = _found("keras_auto.resuming")
    assert one == other and len(one) == 5
    for name, (same, mode, _) in one.items():
        assert same and name.replace(EARLIER_FP16, DENSE).endswith(mode), name


def test_a_rank_whose_file_is_lost_does_what_the_others_do():
    one, other = _found("keras_auto_choice.lost")
    assert one == other and len(one) == 3


@pytest.mark.slow
def test_a_trial_that_was_interrupted_begins_anew_and_loses_nothing():
    one, other = _found("keras_auto_choice.undecided")
    assert one == other
    assert one["mode"] == [DENSE, False] and one["same"] and one["slots"] and one["later"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_what_waits_of_variables_goes_with_them_to_another_set(name):
    one, other = _found("keras_auto_choice.given_up")
    assert one == other
    for found in (one, other):
        assert found[f"several, {name}"] == [True] * 3, found
        assert found[f"several, {name}, modes"] == [DENSE, DENSE] and found[f"several, {name}, finite"]


@pytest.mark.slow
def test_sums_half_precision_limits_and_rates():
    one, other = _found("keras_auto.of_other_kinds")
    assert one == other and one["rates"]
    for name in ("SGD", "AdamW"):
        assert 0.3 < one[f"sum, {name}"][1] < 3, "the momentum that comes back is of the size that went"
    assert one["bfloat16"][1] and one["float64"][1]


def test_a_checkpoint_of_no_step_has_chosen_nothing():
    one, other = _found("keras_auto_choice.early")
    assert one == other and one["mode"] == [DENSE, False]


def test_what_cannot_be_compressed_is_left_to_stock_horovod():
    one, other = _found("keras_auto_choice.beside")
    assert one == other
    assert one["sparse"][0] and one["amsgrad"][0] and one["tape"] != 0


def test_fit_says_how_many_steps_there_are():
    for found in _found("keras_auto_choice.fit_tells"):
        assert found == {"16": [16, 1.0, True], "4000": [4000, 0.005, False]}


@pytest.mark.slow
def test_workers_of_nodes_switch_alike():
    found = [rank["keras_auto.on_nodes"] for rank in run_ranks(4, ["keras_auto.on_nodes"])]
    for name in ("SGD", "AdamW"):
        assert all(each[name] == found[0][name] for each in found)
        assert len(set(found[0][name])) == len(found[0][name])
        assert all(each[f"{name}, left"] == 0 and each[f"{name}, finite"] for each in found)
    assert found[0]["nodes"] == 2


@pytest.mark.slow
def test_ranks_with_uneven_data_choose_alike_and_one_that_stays_away_is_an_error_not_a_hang(tmp_path):
    case = "keras_auto_choice.uneven"
    one, other = (
        rank[case] for rank in run_ranks(2, [case], environment={"DGC_TIMEOUT": "10"}, fresh=True, folder=tmp_path)
    )
    assert one["join"] == other["join"] == [DENSE, True] and one["met"] == other["met"] == [True, False]
    assert "waited 10 s for" in one["error"]
