"""Biases and norms: however they travel the replicas agree and nothing is lost."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = ["every_way", "nan_in_a_bias", "nothing_compressed"]
# Distance of the weights after 30 steps from those with fp32 biases: the least shows that fewer bits do travel.
DISTANCE = {"fp32": (0, 0), "fp16": (1e-7, 5e-2), "bf16": (1e-7, 5e-2), "8bit": (1e-7, 5e-2), "auto": (1e-7, 5e-2)}


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"small_tensors.{case}" for case in CASES])


@pytest.mark.parametrize("way", DISTANCE)
def test_every_way(ranks, way):
    found = [rank["small_tensors.every_way"] for rank in ranks]
    least, most = DISTANCE[way]
    assert found[0][way]["fingerprint"] == found[1][way]["fingerprint"]
    assert least <= found[0][way]["distance"] <= most
    first, last = found[0][way]["losses"]
    assert last < first
    sent = {name: figures["sent"] for name, figures in found[0].items()}
    assert sent["auto"] == sent["8bit"] < sent["bf16"] < sent["fp32"] and sent["fp16"] < sent["fp32"]


def test_nan_in_a_bias_stops_that_step_everywhere(ranks):
    found = [rank["small_tensors.nan_in_a_bias"] for rank in ranks]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    for rank in found:
        assert [moved > 0 for moved in rank["moved"]] == [True, True, False, True, True, True]


def test_a_model_of_small_tensors_is_told_so(ranks):
    told = ranks[0]["small_tensors.nothing_compressed"]
    assert all(len(texts) == 1 for texts in told.values()), told
