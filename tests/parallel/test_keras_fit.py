"""Keras 3 on real ranks: replicas, dense training, density 1. Stock Horovod fails here: test_keras_stock.py."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.tensorflow", reason="Horovod is not built for TensorFlow here")

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["replicas", "density_one_is_dense"]
OPTIONS = ["dense_options", "own_loops", "dense_is_one_process"]
SAME = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        ("gloo", 2),
        pytest.param(("gloo", 3), marks=pytest.mark.slow),
        pytest.param(("mpi", 2), marks=[pytest.mark.mpi, pytest.mark.slow]),  # Keras over MPI: test_keras_messages.py
    ],
    ids=str,
)
def ranks(request):
    controller, workers = request.param
    return run_ranks(workers, [f"keras_fit.{case}" for case in CASES], controller)


@pytest.fixture(scope="module")
def two():
    return run_ranks(2, [f"keras_fit.{case}" for case in OPTIONS])


def test_replicas_are_bit_identical(ranks):
    for name in ranks[0]["keras_fit.replicas"]:
        assert len({found["keras_fit.replicas"][name]["weights"] for found in ranks}) == 1, name


def test_what_is_sent(ranks):
    stats = {name: row["stats"] for name, row in ranks[0]["keras_fit.replicas"].items()}
    assert stats["none"]["bytes_sent"] == stats["none"]["bytes_dense"] == 2 * stats["fp16"]["bytes_sent"]
    for name in ("dgc", "gaussian"):
        assert 0.03 < stats[name]["selected"] / stats[name]["elements"] < 0.06
        assert 15 < stats[name]["bytes_dense"] / stats[name]["bytes_sent"] < 40
    assert stats["dgc, warm-up"]["selected"] > 2 * 0.01 * stats["dgc, warm-up"]["elements"]


@pytest.mark.slow
def test_dense_is_one_process_with_the_whole_batch(two):
    found = dict(two[0]["keras_fit.dense_is_one_process"])
    assert 0 < found.pop("fp16") < 2e-3
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_density_one_is_dense(ranks):
    found = dict(ranks[0]["keras_fit.density_one_is_dense"])
    assert found.pop("wrong on purpose") > 1e-3, "a compressed run equals a dense one: it was silently dense"
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


@pytest.mark.slow
def test_options_and_arguments(two):
    _check_distances(two[0]["keras_fit.dense_options"])


def _check_distances(found):
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


@pytest.mark.slow
def test_own_loops_are_fit(two):
    for name, row in two[0]["keras_fit.own_loops"].items():
        assert row["distance"] <= 1e-3, name  # the loss is summed in another order
        assert len({found["keras_fit.own_loops"][name]["weights"] for found in two}) == 1


@pytest.mark.slow
def test_density_one_with_options():
    _check_distances(run_ranks(2, ["keras_fit.density_one_options"])[0]["keras_fit.density_one_options"])


@pytest.mark.slow
def test_it_is_a_keras_optimizer():
    two = run_ranks(2, ["keras_fit.kinds_of_optimizer"])
    for found in (found["keras_fit.kinds_of_optimizer"] for found in two):
        assert found["same class"] == ["SGD", "keras.src.optimizers.sgd", True]
        assert found["config is kept"] and found["again"] == ["SGD", True, True] and found["again trains"]
        for name in ("lion", "adafactor", "adam"):
            assert found[name] == two[0]["keras_fit.kinds_of_optimizer"][name]
