"""Fed the same gradients, both PyTorch adapters keep, send and apply the same bits, one rank's infinity included."""

from __future__ import annotations

import pytest

from tests.helpers.fed import STEPS
from tests.helpers.ranks import run_ranks
from tests.parallel.cases.ddp_fed import FEW, NODES, PRESETS, SUMMED

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("workers", "case"), [(2, "of_few"), *(pytest.param(n, "of_all", marks=pytest.mark.slow) for n in (2, 3, 4))]
)
def test_bits_are_those_of_the_horovod_adapter(workers, case):
    for rank in run_ranks(workers, [f"ddp_fed.{case}"], timeout=200):
        presets = rank[f"ddp_fed.{case}"]
        assert list(presets) == list(PRESETS if case == "of_all" else FEW)
        for preset, found in presets.items():
            assert len(found["Horovod"]) == STEPS
            assert len({row["weights"] for row in found["DDP"]}) > 2, f"{preset}: nothing was trained"
            if (
                preset not in SUMMED or workers == 2
            ):  # two terms have one sum, of more it depends on the library's order
                assert found["DDP"] == found["Horovod"] and found["plain"] == found["Horovod"], preset


@pytest.mark.slow
def test_on_nodes_bits_are_those_of_the_horovod_adapter():
    for rank in run_ranks(4, ["ddp_fed.on_nodes"], timeout=200):
        assert set(rank["ddp_fed.on_nodes"]) == set(NODES)
        for found in rank["ddp_fed.on_nodes"].values():
            assert len(found["Horovod"]) == STEPS and found["Horovod"][-1]["node size"] == 2
            assert found["DDP"] == found["Horovod"] and found["plain"] == found["Horovod"]
            assert len({row["weights"] for row in found["DDP"]}) > 2, "nothing was trained"
