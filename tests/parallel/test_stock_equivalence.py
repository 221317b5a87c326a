"""At density 1, masking off, values fp32: stock Horovod to 1e-5, for every argument. And not by accident."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = [
    "sgd_options",
    "arguments",
    "frozen_half_way",
    "adamw",
    "sparse_embedding",
    "resumed_from_stock",
    "adam_from_stock",
]
SAME = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        ("gloo", 2),
        pytest.param(("gloo", 3), marks=pytest.mark.slow),
        pytest.param(("gloo", 4), marks=pytest.mark.slow),
        pytest.param(("nodes", 4), marks=pytest.mark.slow),
        pytest.param(("mpi", 2), marks=[pytest.mark.mpi, pytest.mark.slow]),
    ],
    ids=str,
)
def ranks(request):
    controller, workers = request.param
    return run_ranks(workers, [f"stock.{case}" for case in CASES], controller)


def test_every_sgd_option(ranks):
    found = dict(ranks[0]["stock.sgd_options"])
    assert found.pop("wrong on purpose") > 1e-3, "a compressed run equals a dense one: it was silently dense"
    # Horovod's ring adds fp16 in an order that depends on what it fused, so stock differs from itself too
    assert 0 <= found.pop("compression fp16") < 2e-3
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_every_argument_of_the_signature(ranks):
    found = dict(ranks[0]["stock.arguments"])
    assert found.pop("sum is not mean") > 1e-3
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_parameter_frozen_half_way(ranks):
    found = ranks[0]["stock.frozen_half_way"]
    assert found["distance"] <= SAME
    before, after = (sum(r["stock.frozen_half_way"][f"norm at {step}"] for r in ranks) for step in (9, 79))
    assert after < 1e-3 * before, "momentum and residual do not drain"


def test_adam_at_density_1_is_stock(ranks):
    assert ranks[0]["stock.adamw"] <= SAME


def test_stock_checkpoints_are_taken_over(ranks):
    found = {**ranks[0]["stock.resumed_from_stock"], "Adam": ranks[0]["stock.adam_from_stock"]["distance"]}
    assert {name: value for name, value in found.items() if not value <= SAME} == {}


def test_sparse_gradients(ranks):
    found = ranks[0]["stock.sparse_embedding"]
    assert found["distance"] <= SAME
    assert "sparse_as_dense=True" in found["error"]
