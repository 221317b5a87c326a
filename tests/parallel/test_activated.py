"""What a job with the activation on PYTHONPATH does to scripts that know Horovod only."""

from __future__ import annotations

import pytest

from dgc_horovod.launch.site import FOLDER
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = [
    "loss_scale_is_seen",
    "each_optimizer_has_its_scaler",
    "scaled_now_and_then",
    "own_choice_is_kept",
    "adam_is_told",
    "sparse_gradients",
    "after_another_init",
    "uneven_data",
    "stock_stays_reachable",
]
SETTINGS = {
    "PYTHONPATH": FOLDER,
    "DGC_COMPRESSION": "dgc",
    "DGC_DENSITY": "0.05",
    "DGC_COMPRESS_1D": "on",
    "DGC_MIN_NUMEL": "1",
}


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def ranks(request):
    found = run_ranks(2, [f"activated.{case}" for case in CASES], request.param, environment=SETTINGS, fresh=True)
    return [{name.split(".")[1]: result for name, result in each.items()} for each in found]


def test_the_loss_scale_is_seen_without_an_edit(ranks):
    for rank in ranks:
        assert rank["loss_scale_is_seen"]["same bits"]
        assert 0.04 < rank["loss_scale_is_seen"]["density"] < 0.06


def test_each_optimizer_has_its_scaler(ranks):
    assert all(rank["each_optimizer_has_its_scaler"] == {"fp32 first": True, "scaled first": True} for rank in ranks)


def test_a_gradient_that_no_scaler_has_scaled_is_taken_as_it_is(ranks):
    """It was divided by the scale of a scaler that had been in use before, or beside it: weights exploded."""
    for rank in ranks:
        for name, (from_stock, from_beginning) in rank["scaled_now_and_then"].items():
            assert from_stock < 1e-5 and from_beginning > 0.01, name


def test_a_choice_among_ours_is_the_scripts(ranks):
    assert [rank["own_choice_is_kept"] for rank in ranks] == [{"density": 0.5, "told": n} for n in (1, 0)]


def test_adam_is_told_once_on_rank_0(ranks):
    assert [rank["adam_is_told"]["told"] for rank in ranks] == [1, 0]


def test_what_is_said_of_other_optimizers_is_said_on_rank_0_too(ranks):
    """Every rank said it, before it knew whether anything would be compressed."""
    first, second = (rank["adam_is_told"]["others"] for rank in ranks)
    assert len(first) == 1 and "plain error feedback" in first[0]
    assert second == []


def test_sparse_gradients_need_no_word_of_the_script(ranks):
    assert all(rank["sparse_gradients"] == {"same bits": True, "replicas": True} for rank in ranks)


def test_horovod_may_be_initialised_again(ranks):
    assert all(rank["after_another_init"] == {"compresses": True, "size": 2} for rank in ranks)


def test_stock_stays_reachable(ranks):
    assert all(rank["stock_stays_reachable"] == {"stock": True, "sum": 2.0} for rank in ranks)


def test_uneven_data_without_an_edit(ranks):
    found = [rank["uneven_data"] for rank in ranks]
    assert found[0] == found[1]
    assert found[0]["False"][0] == 1 and found[0]["False"][2:] == [1.0, 12]
    assert found[0]["True"][2] > 16 and found[0]["True"][3] == 12
