"""Messages that a device has not made when the next gradient comes: the same bits, at whatever time they are there."""

from __future__ import annotations

import pytest

from tests.helpers.late import SPEEDS
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel


def check(ranks, case):
    assert ranks[0][case] == ranks[1][case]
    for name, weights in ranks[0][case].items():
        assert set(weights) == set(SPEEDS) and len(set(weights.values())) == 1, name
    return ranks[0][case]


def test_over_horovod():
    ranks = run_ranks(2, ["late.same_weights", "late.after_backward"])
    found = check(ranks, "late.same_weights")
    assert len({weights["never"] for weights in found.values()}) == len(found)
    for rank in ranks:  # handed on at the end of the backward pass, before the script goes on
        assert rank["late.after_backward"] == {"1": [True, False], "2": [True, False]}


@pytest.mark.ranks(2, "ddp")
def test_over_torch_distributed():
    check(run_torch_ranks(2, ["ddp_late.same_weights"]), "ddp_late.same_weights")


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_over_horovod_on_nodes():
    check(run_ranks(4, ["late.on_nodes"], "nodes"), "late.on_nodes")


@pytest.mark.slow
@pytest.mark.ranks(4, "ddp")
def test_over_torch_distributed_on_nodes():
    check(run_torch_ranks(4, ["ddp_late.on_nodes"], nodes=2), "ddp_late.on_nodes")
