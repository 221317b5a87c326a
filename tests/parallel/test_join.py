"""Uneven data, with local steps too: ranks that have finished are in join() while the others go on."""

from __future__ import annotations

import re

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.ranks(3, last=1)]
CASES = [
    "like_stock",
    "nobodys_step",
    "other_learning_rates",
    "two_optimizers",
    "not_finite",
    "part_of_a_step",
    "refused",
    "something_else_meanwhile",
]
LOCAL = [f"local_steps_join.{case}" for case in ("averaging", "around", "beside_another", "at_once")]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, [*(f"join.{case}" for case in CASES), *LOCAL], timeout=300)


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
def test_uneven_data_give_what_stock_horovod_gives(ranks, optimizer):
    found = [rank["join.like_stock"][optimizer] for rank in ranks]
    assert len({each["fingerprint"] for each in found}) == 1
    for each in found:
        assert each["last"] == each["stock's last"] == 1
        assert each["joined"] < 1e-6 and each["afterwards"] < 1e-6


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_a_join_of_all_at_once_changes_nothing(ranks, optimizer):
    without, with_join = ranks[0]["join.nobodys_step"][optimizer]
    assert without == with_join


def test_those_who_came_early_become_as_the_last_one(ranks):
    found = [rank["join.other_learning_rates"] for rank in ranks]
    assert found[0] == found[1] == found[2] and found[0]["SGD"][2] == 18


def test_two_optimizers_in_any_order(ranks):
    found = [rank["join.two_optimizers"] for rank in ranks]
    assert found[0] == found[1] == found[2]
    assert found[0]["last"] == 1 and found[0]["steps"] == [9, 4]


def test_a_step_that_is_not_finite_is_skipped_in_join_as_well(ranks):
    found = [rank["join.not_finite"] for rank in ranks]
    assert found[0] == found[1] == found[2] and found[0]["finite"] and found[0]["last"] == 1


def test_what_makes_no_whole_step_stays_and_loss_scales_are_shared(ranks):
    found = [rank["join.part_of_a_step"] for rank in ranks]
    assert found[0] == found[1] == found[2]
    assert found[0]["kept"] and found[0]["scale"] > 8


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing compressed", "UnsupportedUse: .*dgcrun: --compression none"),
        ("bound before", r"DGCError: .*Call hvd.join\(\)"),
        ("between", r"between backward\(\) and step\(\)"),
        ("part", "an optimizer of some of them"),
        ("stock again", "^[012]$"),
    ],
)
def test_what_is_refused(ranks, case, words):
    for rank in ranks[: 2 if case == "part" else 3]:
        assert re.search(words, rank["join.refused"][case]), rank


def test_another_exchange_meanwhile_is_an_error_not_a_hang(ranks):
    found = ranks[0]["join.something_else_meanwhile"]
    assert re.match(r"CollectiveTimeout: rank 0 of 3 waited 2 s in join\(\)", found["error"])
    assert found["seconds"] < 20


def _local(ranks, case):
    return [rank[f"local_steps_join.{case}"] for rank in ranks]


def test_every_exchange_is_the_mean_of_all_ranks_weights_of_local_steps(ranks):
    found = _local(ranks, "averaging")
    assert len({each["replica"] for each in found}) == 1
    for each in found:
        assert each["apart"] <= 1e-5 and each["last"] == 1 and each["own"], each
        assert each["exchanges"] == 4 and each["in the round"] == 0, "three full rounds, and the end of join"


def test_epochs_schedules_and_an_exchange_that_is_not_finite(ranks):
    one, *others = _local(ranks, "around")
    assert all(each["ends"] == one["ends"] for each in others)
    assert [end[:2] for end in one["ends"]] == [[1, True]] * 2
    assert all(each["finite"] and each["skipped"] == 2 for each in _local(ranks, "around"))


def test_beside_an_optimizer_that_exchanges_at_each_step(ranks):
    one, *others = _local(ranks, "beside_another")
    assert all(each == one for each in others)
    assert one["last"] == 1 and one["steps"] == [4, 15]


def test_a_join_of_all_at_once_is_an_exchange_of_local_steps(ranks):
    for found in _local(ranks, "at_once"):
        assert found["ends"][0] == found["ends"][1]
