"""Models that are cast or cut, gradients that scripts set, optimizers that are dropped or loaded, on real ranks."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.parallel
CASES = [
    "cut_or_turned",
    "cast",
    "own_gradients",
    "dropped",
    "commits_within_an_accumulation",
    "loaded_by_one_rank",
    "parts_and_additions",
    "epochs_of_any_kind",
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, [f"after_wrapping.{case}" for case in CASES], timeout=180)


def test_gradients_of_another_size_or_kind_are_refused(ranks):
    """Kernels had written beyond their memory."""
    for found in (rank["after_wrapping.cut_or_turned"] for rank in ranks):
        for error in found.values():
            assert error.startswith("UnsupportedUse: the gradient of '"), found
            assert "as when the optimizer was wrapped" in error
        assert "complex64" in found["complex"] and "complex" not in found["whole"] + found["clipped"]


def test_a_model_that_is_cast_after_wrapping_trains_as_with_stock_horovod(ranks):
    """Adam's zeros had stayed in the dtype of wrapping: its first step had failed."""
    found, other = (rank["after_wrapping.cast"] for rank in ranks)
    for kind in ("adam", "sgd"):
        assert found[f"{kind}, topk and stock"] < 1e-5
        for way in ("topk", "dgc", "local"):
            for dtype in ("torch.float64", "torch.bfloat16"):
                case = f"{kind}, {way}, {dtype}"
                assert found[case]["print"] == other[case]["print"], case
                assert set(found[case]["dtypes"]) <= {dtype}, case


def test_gradients_that_a_script_sets_itself_are_new_ones(ranks):
    """With as many writes in place as the applied ones they had been taken for those: a false error."""
    for found in (rank["after_wrapping.own_gradients"] for rank in ranks):
        assert found["errors"] == ["", ""] and found["distance"] < 1e-5
        assert "step() was called again with no backward pass" in found["twice"]


def test_what_is_dropped_goes_at_once(ranks):
    """u, v and gradients had waited for Python's collector of cycles."""
    for rank in ranks:
        assert not any(rank["after_wrapping.dropped"])


def test_a_commit_within_an_accumulation(ranks):
    """It had ended the job."""
    found = [rank["after_wrapping.commits_within_an_accumulation"] for rank in ranks]
    for each in found:
        assert each["errors"] == ["", ""] and each["back"] == [True, True]
        assert "between two steps only" in each["refused"]
    assert found[0]["print"] == found[1]["print"]


def test_a_state_that_rank_0_alone_has_loaded_reaches_all(ranks):
    """Empty entries had made Horovod broadcast other tensors on each rank."""
    found, other = (rank["after_wrapping.loaded_by_one_rank"] for rank in ranks)
    for name, each in found.items():
        assert each == other[name], name
        assert each["lr"] == 0.05 and not each["moved"], name
    assert "max_exp_avg_sq" in found["amsgrad, topk"]["state"] and found["no momentum, topk"]["state"] == "{}"


def test_parts_of_a_model_have_directories_of_their_own(ranks):
    """The second optimizer had replaced the checkpoint of the first."""
    for found in (rank["after_wrapping.parts_and_additions"] for rank in ranks):
        replaced, added = found["errors"]
        assert "the checkpoint of another optimizer" in replaced
        assert added.startswith("UnsupportedUse: a parameter of shape (32, 64) was added")


def test_epochs_become_whole_numbers(ranks):
    """2.0 had been saved and then refused; an integer of NumPy could not be saved."""
    for found in (rank["after_wrapping.epochs_of_any_kind"] for rank in ranks):
        assert found["kept"] == ["1", "1", "2", "2", "2", "2", "1", "1"]
        assert [error.split(", got ")[1] for error in found["errors"]] == ["1.5", "'2'", "None"]
