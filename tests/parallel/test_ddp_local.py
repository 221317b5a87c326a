"""Local steps over torch.distributed, on real ranks without Horovod."""

from __future__ import annotations

import pytest

from tests.helpers.torch_ranks import run_torch_ranks
from tests.parallel.cases.ddp_local import H

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    cases = [f"ddp_local.{case}" for case in ("averaging", "replicas", "resuming", "refused")]
    return [
        {name.split(".")[1]: found for name, found in rank.items()} for rank in run_torch_ranks(2, cases, folder=folder)
    ]


def test_at_density_1_the_weights_become_their_mean(ranks):
    for found in ranks:
        assert max(found["averaging"].values()) <= 1e-5, found["averaging"]


def test_replicas_are_equal_after_each_exchange_and_only_then(ranks):
    one, other = (found["replicas"] for found in ranks)
    assert one["DDP, exchanges"] == one["plain, exchanges"] == 12
    for name in ("DDP", "plain"):
        same = [a == b for a, b in zip(one[name], other[name], strict=True)]
        assert same == [(step + 1) % H == 0 for step in range(12 * H)]


def test_a_resumed_run_is_the_uninterrupted_one(ranks):
    one, other = (found["resuming"] for found in ranks)
    assert one == other and one["same"]


def test_sums_are_refused(ranks):
    assert all("average" in found["refused"]["sum"] for found in ranks)
