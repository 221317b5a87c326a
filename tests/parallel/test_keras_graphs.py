"""Collectives in TensorFlow's graphs, on real ranks."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ("from_host_call_to_c", "same_names", "unused_on_one_rank", "traced_again", "sparse_on_one_rank", "two_outputs")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_graphs.{case}" for case in CASES], environment={"DGC_TIMEOUT": "20"}, timeout=200)


def test_few_calls_lie_between_a_host_call_and_c(ranks):
    for rank in ranks:
        found = rank["keras_graphs.from_host_call_to_c"]
        assert found and all(calls[-1] == "accumulate" and len(calls) <= 9 for calls in found), found


def test_two_exchanges_of_one_graph_are_not_mixed_up(ranks):
    """Averages had been swapped on one rank, and the replicas diverged, without a word."""
    first, second = (rank["keras_graphs.same_names"] for rank in ranks)
    assert first == second
    assert first["tape"] == pytest.approx([1, 10]) and first["optimizer"] == pytest.approx([-0.3] * 4)


def test_a_variable_that_one_rank_does_not_use_takes_part_with_zeros(ranks):
    """TensorFlow had run the collective of a constant once, and applied its result at every step."""
    for rank in ranks:
        for way, values in rank["keras_graphs.unused_on_one_rank"].items():
            assert values == pytest.approx([0.95, 0.85, 0.70], abs=1e-5), way


def test_a_rank_may_trace_a_constant_gradient_again(ranks):
    for rank in ranks:
        assert rank["keras_graphs.traced_again"] == pytest.approx({"none": 0.97, "dgc": 0.97}, abs=1e-5)


def test_rows_that_one_rank_alone_has(ranks):
    for rank in ranks:
        assert rank["keras_graphs.sparse_on_one_rank"] == pytest.approx([0.9, 0.9, 1.0, 0.8], abs=1e-6)


def test_an_output_without_a_loss_on_one_rank(ranks):
    first, second = (rank["keras_graphs.two_outputs"] for rank in ranks)
    assert first == second and all(size > 0 for size in first[:1])
