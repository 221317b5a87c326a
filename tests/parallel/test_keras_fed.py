"""On the same gradients the TensorFlow adapter is the torch adapter, bit for bit; and what is missing or not finite."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.fed import SETTINGS, STEPS
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["by_hand", "missing_gradients", "not_finite", "overflow"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"keras_fed.{case}" for case in CASES])


@pytest.fixture(scope="module")
def torch_ranks():
    return run_ranks(2, ["fed.with_torch"])


@pytest.mark.slow  # that bits stay what they were: test_transcripts.py
def test_the_engines_numbers_are_those_of_the_torch_adapter(torch_ranks):
    ranks = run_ranks(2, ["keras_fed.with_tensorflow"])
    for ours, theirs in zip(ranks, torch_ranks, strict=True):
        expected = theirs["fed.with_torch"]
        assert expected.keys() == SETTINGS.keys()
        for mode in ("graph", "eager"):
            assert ours["keras_fed.with_tensorflow"][mode] == expected
        for rows in expected.values():
            assert len({row["v"] for row in rows}) == STEPS, "the residual does not move"
        assert all(int(rows[-1]["non-zero"]) > 0 for name, rows in expected.items() if name != "scattered")


@pytest.mark.slow
def test_through_torch_and_dlpack_as_well(torch_ranks):
    """The way of gradients on a GPU, here on the host."""
    ranks = run_ranks(2, ["keras_fed.with_tensorflow"], environment={"DGC_BACKEND": "torch_eager"})
    for ours, theirs in zip(ranks, torch_ranks, strict=True):
        for mode in ("graph", "eager"):
            assert ours["keras_fed.with_tensorflow"][mode] == theirs["fed.with_torch"]


def test_arithmetic_by_hand(ranks):
    assert {name: value for name, value in ranks[0]["keras_fed.by_hand"].items() if not value < 1e-5} == {}


def test_missing_gradients(ranks):
    for found in (found["keras_fed.missing_gradients"] for found in ranks):
        for name in ("none", "everything"):
            assert found[name] == [-2.0, -1.0, 0.0]
            assert "'c' had a gradient on no rank at the first step" in found[f"{name}: late"]


def test_a_step_that_is_not_finite_is_applied_nowhere(ranks):
    for mode in ("graph", "eager"):
        rows = [found["keras_fed.not_finite"][mode] for found in ranks]
        assert all(all(value for name, value in row.items() if name != "weights") for row in rows), rows
        assert rows[0]["weights"] == rows[1]["weights"]


def test_an_overflow_on_one_rank_is_skipped_on_all(ranks):
    assert ranks[0]["keras_fed.overflow"] == ranks[1]["keras_fed.overflow"]
    for name, found in ranks[0]["keras_fed.overflow"].items():
        skipped = round(math.log2(2.0**15 / found["scale"]))
        assert found["finite"] and 1 <= skipped <= 2, name
        assert found["iterations"] == 4 - skipped, name
        assert found["stats"] == found["iterations"] // (2 if name == "accumulating" else 1), name
