"""Fed the same gradients, both PyTorch adapters keep, send and apply the same bits, one rank's infinity included."""

from __future__ import annotations

import pytest

from tests.helpers.fed import STEPS
from tests.helpers.ranks import run_ranks
from tests.parallel.cases.ddp_fed import NODES, PRESETS, SUMMED

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def ranks(request):
    return run_ranks(request.param, ["ddp_fed.of_all"], timeout=200)


@pytest.mark.parametrize("preset", PRESETS)
def test_bits_are_those_of_the_horovod_adapter(ranks, preset):
    if preset in SUMMED and len(ranks) > 2:
        pytest.skip("two terms have one sum, of more it depends on the order, which is the library's")
    for rank in ranks:
        found = rank["ddp_fed.of_all"][preset]
        assert len(found["Horovod"]) == STEPS
        assert found["DDP"] == found["Horovod"] and found["plain"] == found["Horovod"]
        assert len({row["weights"] for row in found["DDP"]}) > 2, "nothing was trained"


@pytest.mark.slow
def test_on_nodes_bits_are_those_of_the_horovod_adapter():
    for rank in run_ranks(4, ["ddp_fed.on_nodes"], timeout=200):
        assert set(rank["ddp_fed.on_nodes"]) == set(NODES)
        for found in rank["ddp_fed.on_nodes"].values():
            assert len(found["Horovod"]) == STEPS and found["Horovod"][-1]["node size"] == 2
            assert found["DDP"] == found["Horovod"] and found["plain"] == found["Horovod"]
            assert len({row["weights"] for row in found["DDP"]}) > 2, "nothing was trained"
