"""Compression.auto under DDP, on real ranks without Horovod."""

from __future__ import annotations

import itertools

import pytest

from dgc_horovod.planning.trial import DENSE, GAIN, SETTLING, TIMED
from dgc_horovod.state.residual_state import EARLIER_FP16
from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
CASES = ("dense_steps", "switching", "choosing", "resuming", "habits", "given_back", "cannot")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    return run_torch_ranks(2, [f"ddp_auto.{case}" for case in CASES], timeout=300, folder=folder)


def _found(ranks, case):
    return [rank[f"ddp_auto.{case}"] for rank in ranks]


def test_dense_steps_are_ddps_bit_by_bit(ranks):
    for found in _found(ranks, "dense_steps"):
        assert found == {"SGD": True, "AdamW": True, "clip_norm": True}


def test_a_switch_changes_nothing_at_density_1_and_leaves_nothing_behind(ranks):
    one, other = _found(ranks, "switching")
    for name in ("SGD", "AdamW"):
        assert one[name] <= 1e-5 and other[name] <= 1e-5
        for views in (False, True):
            replicas = one[f"{name}, replicas, {views}"]
            assert replicas == other[f"{name}, replicas, {views}"] and len(set(replicas)) == len(replicas)
            assert one[f"{name}, left, {views}"] == 0, "dense steps leave nothing behind"


def test_every_rank_comes_to_the_choice_that_the_clock_says(ranks):
    one, other = ({**found, "told": None} for found in _found(ranks, "choosing"))
    assert one == other and all(found["told"] for found in _found(ranks, "choosing"))
    assert one["ended"] and one["steps"] == len(one["modes"])
    assert one["modes"][: SETTLING + TIMED] == [DENSE] * (SETTLING + TIMED)
    assert {mode for mode, _ in itertools.groupby(one["modes"])} == set(one["seconds"])
    best = min(one["seconds"], key=one["seconds"].get)
    assert one["modes"][-1] == (best if one["seconds"][best] <= GAIN * one["seconds"][DENSE] else DENSE)


def test_a_resumed_run_is_the_uninterrupted_one_in_each_state(ranks):
    one, other = _found(ranks, "resuming")
    assert one == other and len(one) == 6
    for name, (same, mode, _) in one.items():
        assert same and name.replace(EARLIER_FP16, DENSE).endswith(mode), name


def test_scripts_that_ddp_runs_go_on(ranks):
    one, other = _found(ranks, "habits")
    assert one == other
    assert one["twice"][:2] == [True, False], "two gradients are no step that can be compressed"
    assert one["scaled"] == [False, True] and one["hooks"] == [3, 3]


def test_a_model_is_given_back_to_ddp(ranks):
    one, other = _found(ranks, "given_back")
    assert one == other and len(one) == 4
    for name, (same, _, told) in one.items():
        assert same and told, name


def test_what_cannot_be_compressed_is_left_to_ddp(ranks):
    one, other = _found(ranks, "cannot")
    assert one == other and not one["ours"]
    assert "use DDP and register()" in one["plain"]
