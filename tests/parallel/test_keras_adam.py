"""Keras' AdamW with the second moment that all ranks share."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_adam.{case}" for case in ("shared", "dense_steps", "handed_on")])


def _alike(ranks, case, *names):
    found = [rank[f"keras_adam.{case}"] for rank in ranks]
    for name in names:
        assert all(each[name] == found[0][name] for each in found), name
    return found


def test_replicas_are_alike_and_learn(ranks):
    for found in _alike(ranks, "shared", "replicas", "second"):
        assert len(set(found["replicas"])) == len(found["replicas"])
        assert found["losses"][-1] < 0.5 * found["losses"][0]


def test_a_keras_file_goes_on_under_stock_adam(ranks):
    for found in (rank["keras_adam.shared"] for rank in ranks):
        assert found["file"] == [True, 40] and found["file, momentum"] == 0
        assert found["goes on"][1] < found["goes on"][0]


def test_of_a_step_that_is_not_finite_nothing_is_learnt(ranks):
    assert all(rank["keras_adam.shared"]["skipped"] == [True, True] for rank in ranks)


def test_a_flush_leaves_stocks_slots_which_are_taken_over_again(ranks):
    for found in (rank["keras_adam.shared"] for rank in ranks):
        assert found["left"] == 0 and found["flushed"] == [False, True]
        momentum, apart = found["slots"]
        assert momentum == 0 and apart < 0.02, "one more step of 40, by whose number the velocity is biased"
        *losses, velocity = found["after"]
        assert velocity == 0 and losses[-1] < found["losses"][-1]


def test_dense_steps_are_stocks_and_what_they_have_learnt_is_taken_over(ranks):
    for found in _alike(ranks, "dense_steps", "replica"):
        assert found["apart"] <= 1e-5 and found["known"] == [False, True] and found["emptied"] == 0
        assert 0.5 < found["ratio"] < 3, "of the velocity, which is biased"
        *stock, velocity = found["stock"]
        assert velocity == 0 and stock[-1] < stock[0] and found["losses"][-1] < found["losses"][0]


def test_what_was_loaded_synced_or_given_fewer_variables_is_whole(ranks):
    for found in _alike(ranks, "handed_on", "replicas", "second"):
        assert found["losses"][1] < found["losses"][0] and found["losses"][2] < 1.5 * found["losses"][0]
        assert 0 < found["moved"] <= 10, "learning rates a step"


@pytest.mark.slow
def test_it_goes_on_bit_by_bit_where_it_was_stopped():
    for found in (rank["keras_adam.resumed"] for rank in run_ranks(2, ["keras_adam.resumed"])):
        assert len(found) == 4
        for half, (resumed, whole) in found.items():
            assert resumed == whole, half
