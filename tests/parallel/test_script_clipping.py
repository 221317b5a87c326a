"""A script's own clipping becomes DGC's local one: real ranks, unmodified idioms."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = [
    "same_as_given",
    "first_step",
    "told",
    "returned_norms",
    "other_clippings",
    "clipped_by_hand",
    "others",
    "uneven_data",
    "loaded_on_one_rank",
    "measured_on_one_rank",
    "more_on_one_rank",
    "resumed",
    "odd_orders",
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"script_clipping.{case}" for case in CASES])


def test_both_idioms_give_the_bits_of_clip_norm(ranks):
    for name in ("sgd", "adamw"):
        found = [rank["script_clipping.same_as_given"][name] for rank in ranks]
        assert found[0].pop("prints") == found[1].pop("prints")
        assert all(found[0].values()), (name, found[0])


def test_the_first_step_leaves_no_more_than_it_should(ranks):
    for rank in ranks:
        found = rank["script_clipping.first_step"]
        assert found["sgd, none"] > 1 and max(found["sgd, after"], found["sgd, before"]) < 1e-5, found
        # of squares, the sum over ranks is known; each had clipped by a factor of its own
        assert max(found["adamw, after"], found["adamw, before"]) < 0.1 * found["adamw, none"], found


def test_what_a_script_clips_is_part_of_the_state(ranks):
    """The first gradient after a resume had entered u and v unclipped."""
    assert [rank["script_clipping.resumed"] for rank in ranks] == 2 * [[True, True]]


def test_a_script_is_told_once(ranks):
    first, second = ranks[0]["script_clipping.told"]
    assert "clips gradients to 0.3" in first and "clip_norm=c" in first
    assert "but clip_norm=3 is set" in second
    assert ranks[1]["script_clipping.told"] == []


def test_the_norm_returned_is_that_of_the_gradients(ranks):
    for rank in ranks:
        found = rank["script_clipping.returned_norms"]
        for when in ("after", "before"):
            assert found[when]["returned"] == pytest.approx(found[when]["expected"], rel=1e-5)
    after = [rank["script_clipping.returned_norms"]["after"]["returned"] for rank in ranks]
    assert after[0] == after[1], "after the exchange every rank must decide alike"


def test_other_clippings(ranks):
    found = ranks[0]["script_clipping.other_clippings"]
    acts = {name.removesuffix(": acts"): found.pop(name) for name in list(found) if name.endswith(": acts")}
    assert min(acts.values()) > 1e-3
    assert max(found.values()) < 1e-5, found


def test_a_script_that_clips_by_hand_is_told_how_to_clip(ranks):
    first, second = (rank["script_clipping.clipped_by_hand"] for rank in ranks)
    assert first["fingerprints"] == second["fingerprints"] and second["told"] == []
    assert len(first["told"]) == 2, "once, whether clip_norm is given or not"
    for text in first["told"]:
        assert "changed p.grad between synchronize() and step()" in text and "pass clip_norm=c" in text


def test_gradients_of_others_and_steps_that_are_not_finite(ranks):
    for rank in ranks:
        found = rank["script_clipping.others"]
        assert found["nan"] and found["norm"] > 100 and found["after"] == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("case", ["uneven_data", "loaded_on_one_rank", "measured_on_one_rank"])
def test_ranks_that_do_something_else_clip_with_the_others(ranks, case):
    assert len({rank[f"script_clipping.{case}"] for rank in ranks}) == 1


def test_a_rank_that_measures_more_than_the_others_makes_nobody_wait(ranks):
    """Ranks told each other as many norms as each had measured, in a collective of that size."""
    first, second = (rank["script_clipping.more_on_one_rank"] for rank in ranks)
    assert first["clipped"] == second["clipped"]  # the weights, and the last norm
    assert first["logged"][0] == second["logged"][0]


def test_norms_of_order_zero_and_below_are_torchs(ranks):
    found = ranks[0]["script_clipping.odd_orders"]
    assert found["fingerprint"] == ranks[1]["script_clipping.odd_orders"]["fingerprint"]
    for own, returned in found["found"]:
        assert returned == pytest.approx(own, rel=1e-4, nan_ok=True)
