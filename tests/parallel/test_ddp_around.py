"""Around a step with DDP: whatever goes wrong on one rank is the same clear error on every rank, and nothing hangs."""

from __future__ import annotations

import pytest

from tests.helpers.metrics_file import check_metrics_file
from tests.helpers.torch_ranks import run_torch_ranks

pytestmark = pytest.mark.parallel
CASES = ["ranks_that_differ", "clipping_by_the_script", "not_finite", "replica_that_differs", "bf16_model"]
CASES += ["clipping_more_on_one_rank", "takes_turns", "frozen_in_dense_steps"]
CASES += ["unwritable_metrics", "another_choice", "clipped_by_hand"]
CASES += ["dropped", "copied", "clipping_in_a_hook", "frozen_later", "limit_without_compression"]
CASES += ["scaled_now_and_then", "other_epochs", "same_epochs"]


@pytest.fixture(scope="module")
def ranks():
    return run_torch_ranks(2, [f"ddp_around.{case}" for case in CASES])


def test_ranks_that_differ(ranks):
    first, second = (rank["ddp_around.ranks_that_differ"] for rank in ranks)
    assert first == second
    assert "config.density: rank 0 has 0.01, rank 1 has 0.02" in first["density"]
    assert "compression: rank 0 has dgc, rank 1 has none" in first["choice"]
    assert "refused: rank 0 has nothing, rank 1 has SGD's dampening" in first["refused"]
    assert "optimizer: rank 0 has AdamW, rank 1 has SGD" in first["optimizer"]


def test_clipping_by_the_script_is_learned(ranks):
    first, second = (rank["ddp_around.clipping_by_the_script"] for rank in ranks)
    assert first["limits"] == second["limits"] == [0.5] and first["is"] == second["is"]
    assert first["norms"][-1] == second["norms"][-1]  # as with DDP alone, what the script sees is the same


def test_a_rank_that_measures_more_makes_nobody_wait(ranks):
    first, second = (rank["ddp_around.clipping_more_on_one_rank"] for rank in ranks)
    assert first == second and first["clipped"]["limit"] == 0.5


def test_clipping_in_a_hook_before_the_step_is_learned(ranks):
    assert [rank["ddp_around.clipping_in_a_hook"] for rank in ranks] == [[0.5], [0.5]]


def test_a_layer_that_is_frozen_stays_as_with_ddp_alone(ranks):
    for rank in ranks:
        assert rank["ddp_around.frozen_later"] == {"dgc": 0, "topk": 0}


def test_a_layer_that_is_frozen_in_all_dense_steps_is_none_that_was_forgotten(ranks):
    """The job stopped when the warm-up ended, as if no dense step had been applied."""
    first, second = (rank["ddp_around.frozen_in_dense_steps"] for rank in ranks)
    assert first == second and first["stays"]
    assert 0.003 < first["moved"] < 0.1, "what had no second moment yet is measured first, and trained then"


def test_networks_that_take_turns_lose_nothing(ranks):
    """What was selected of a frozen layer was thrown away, at every step."""
    for rank in ranks:
        assert max(rank["ddp_around.takes_turns"].values()) < 1e-4


def test_a_gradient_that_no_scaler_has_scaled_is_taken_as_it_is(ranks):
    """It was divided by the scale of a scaler that had been in use before, or beside it: weights exploded."""
    for rank in ranks:
        for name, (from_stock, from_beginning) in rank["ddp_around.scaled_now_and_then"].items():
            assert from_stock < 1e-5 and from_beginning > 0.01, name


def test_a_limit_holds_where_ddp_exchanges(ranks):
    assert [rank["ddp_around.limit_without_compression"] for rank in ranks] == pytest.approx([0.01, 0.01], rel=1e-3)


def test_a_whole_model_can_be_saved_and_copied(ranks):
    """The hook's state was a weak reference, which nothing can pickle: torch.save(model) failed."""
    first, second = (rank["ddp_around.copied"] for rank in ranks)
    assert first == second and first["of the model"] == 3
    assert first["loaded"] == first["copied"] == first["fresh"] and first["fresh"][0] == 3


def test_not_finite(ranks):
    first, second = (rank["ddp_around.not_finite"] for rank in ranks)
    (said,) = first.pop("said")
    assert said.endswith("skipped 10 of the last 10 steps") and second.pop("said") == []
    assert first == second and first["skipped"] == 1
    assert first["for long"].startswith("NotFinite: step 12: a gradient") and "11 in a row" in first["for long"]
    assert "NotFinite: step 2: a gradient was not finite on rank 1" in first["stops"]
    assert "NotFinite: step 0: Dividing has made the weights of '0.weight' that are not finite" in first["made"]
    assert "NotFinite: step 0: the weights of '2.weight' are not finite, and so gradients are not" in first["had"]


def test_replica_that_differs(ranks):
    first, second = (rank["ddp_around.replica_that_differs"] for rank in ranks)
    assert first == second and "ReplicaMismatch" in first["stop"] and len(first["broadcast"]) == 64


def test_a_model_in_bf16(ranks):
    first, second = (rank["ddp_around.bf16_model"] for rank in ranks)
    assert first["is"] == second["is"]
    assert sum(first["losses"][-5:]) < 0.7 * sum(first["losses"][:5])


def test_an_update_that_is_dropped_is_told_of(ranks):
    """Where the model's own zero_grad dropped it, as in GANs, it was an error that spoke of another cause."""
    told, end, *by_the_model = ranks[0]["ddp_around.dropped"]
    assert told == ["dropped"] and by_the_model == [told, end] and ranks[1]["ddp_around.dropped"][1::2] == [end, end]


@pytest.fixture(scope="module")
def waited_in_vain(tmp_path_factory):
    cases = [f"ddp_around.{case}" for case in ("flush_alone", "flush_after_more_steps", "late", "unregistered")]
    folder = tmp_path_factory.mktemp("told")
    return run_torch_ranks(2, cases, environment={"DGC_TIMEOUT": "5"}, folder=folder, last=True)


@pytest.mark.ranks(2, last=1)
def test_a_rank_that_makes_no_step(waited_in_vain):
    said = waited_in_vain[0]
    assert "CollectiveTimeout: rank 0 of 2 waited 5 s" in said["ddp_around.late"]
    assert "CollectiveTimeout: rank 0 waited 2 s for register()" in said["ddp_around.unregistered"]


def test_another_epoch_on_one_rank_is_the_same_error_on_every_rank(ranks):
    """Gloo ended the process that got the longer packet, from a thread of its own: no error named the epoch."""
    first, second = (rank["ddp_around.other_epochs"] for rank in ranks)
    assert first == second and len(first) == 5
    for name, text in first.items():
        assert "RankMismatch: step 2: the ranks are at different densities: rank 0 has" in text, (name, text)
        assert "rank 0 has" in text and "in epoch 1, rank 1 has" in text and "in epoch 2." in text


def test_the_same_epochs_on_every_rank_train_as_counted_ones(ranks):
    for rank in ranks:
        (told, sent), (counted, wanted) = (rank["ddp_around.same_epochs"][name] for name in ("told", "counted"))
        assert told == counted and sent - wanted == 7 * 16  # in the 6 steps of the warm-up and the one after it


@pytest.mark.ranks(2, last=1)
def test_a_flush_that_not_every_rank_has_come_to(waited_in_vain):
    """Its messages met packets of another size, and Gloo ended the process that got the longer ones."""
    for rank in waited_in_vain:
        for case in ("ddp_around.flush_alone", "ddp_around.flush_after_more_steps"):
            assert rank[case].startswith(("CollectiveTimeout: rank", "LostRank: rank")), rank
            assert "CollectiveTimeout" not in rank[case] or "unequal shards?" in rank[case]


def test_a_metrics_file_that_cannot_be_written_stops_every_rank_alike(ranks):
    """Rank 1 had registered, and waited; on rank 0 the hook and the optimizer's claim were left behind."""
    first, second = (rank["ddp_around.unwritable_metrics"] for rank in ranks)
    assert first == second and "refused: rank 0 has the metrics file" in first["error"]


def test_a_model_is_registered_again_with_another_choice(ranks):
    first, second = (rank["ddp_around.another_choice"] for rank in ranks)
    assert first == second and first["steps"] == 4 and first["given back"]
    assert "make a new torch optimizer, and load this one's state_dict() after flush()" in first["refused"]


def test_a_script_that_clips_by_hand_is_told_how_to_clip(ranks):
    first, second = (rank["ddp_around.clipped_by_hand"] for rank in ranks)
    (told,) = first["told"]
    assert first["is"] == second["is"] and second["told"] == [] and "pass clip_norm=c" in told


@pytest.mark.slow
def test_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run_torch_ranks(2, ["ddp_around.metrics"], environment={"DGC_METRICS_FILE": str(path)}, fresh=True)
    check_metrics_file(path, "dgc")
