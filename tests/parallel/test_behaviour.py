"""Hand-computed steps, loss scaling, clipping, dtypes, process sets and overlap, on real ranks."""

from __future__ import annotations

import json

import pytest

from tests.helpers import hand_table
from tests.helpers.ranks import check_metrics_file, run_ranks

pytestmark = pytest.mark.parallel
CASES = [
    "hand_tables", "loss_scaling", "clipping", "epochs_observed", "larger_batch_identity", "synchronize_twice",
    "resume_on_rank_zero", "step_hooks", "other_memory", "from_hook_to_c",
]  # fmt: skip
DTYPES = [
    "clipped_doubles",
    "low_precision",
    "cast_after_wrapping",
    "channels_last_clipped",
    "half_overflow",
    "through_host_memory",
]


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.slow])])
def ranks(request):
    cases = [*(f"behaviour.{case}" for case in CASES), *(f"dtypes.{case}" for case in DTYPES)]
    return run_ranks(2, cases, request.param)


def test_few_calls_lie_between_a_hook_and_c(ranks):
    for rank in ranks:
        found = rank["behaviour.from_hook_to_c"]
        assert len(found) > 1 and all(calls[0] == "ready" and len(calls) <= 7 for calls in found), found


@pytest.mark.parametrize(
    ("name", "table"),
    [("momentum", hand_table.MOMENTUM_TABLE), ("nesterov", hand_table.NESTEROV_TABLE), ("nan", hand_table.NAN_TABLE)],
)
def test_hand_computed_steps(ranks, name, table):
    for step, row in enumerate(table):
        for rank in (0, 1):
            found = ranks[rank]["behaviour.hand_tables"][name][step]
            assert found["u"] == row["u"][rank], (step, rank)
            assert found["v"] == row["v"][rank], (step, rank)
            if row["mean"] is None:
                assert found["grad"] == [None] * 6 and found["moved"] == [0] * 6
            else:
                assert found["grad"] == row["mean"] and found["moved"] == row["mean"]


def test_loss_scaling(ranks):
    found = [rank["behaviour.loss_scaling"] for rank in ranks]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    for result in found:
        assert all(result[key] for key in ("same bits", "scale grew", "scale fell", "finite", "finite weights")), result


def test_clipping(ranks):
    found = ranks[0]["behaviour.clipping"]
    assert found["harmless"] and found["loose clip"] and found["clip acts"] > 1e-3
    assert len(found["warnings"]) == 2, "one without clip_norm, one for another c; none for the same c"
    assert len(found["too late"]) == 1


def test_epoch_is_observed(ranks):
    found = [rank["behaviour.epochs_observed"] for rank in ranks]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0]["densities"] == pytest.approx([0.25, 0.0625, 0.015625, 0.01], rel=0.01)


def test_synchronize_twice_is_once(ranks):
    for rank in ranks:
        assert len(set(rank["behaviour.synchronize_twice"]["fingerprints"])) == 1


def test_memory_given_to_a_gradient_during_its_exchange_counts_for_nothing(ranks):
    found = {text for rank in ranks for text in rank["behaviour.other_memory"]["fingerprints"]}
    assert len(found) == 1


def test_low_precision(ranks):
    found = [rank["dtypes.low_precision"] for rank in ranks]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0]["dtypes"] == ["torch.bfloat16"] and found[0]["state dtypes"] == ["float32"]
    assert found[0]["fp32 shadow"] == [True, True]


@pytest.mark.parametrize("case", ["cast_after_wrapping", "channels_last_clipped"])
def test_dtypes_and_layouts(ranks, case):
    found = [rank[f"dtypes.{case}"] for rank in ranks]
    assert found[0]["fingerprint"] == found[1]["fingerprint"]
    assert found[0].get("in flight", 1) > 0, "the hooks no longer fire"


def test_gradients_in_float64_are_clipped(ranks):
    """torch has no norm of them in fp32: an error at the next step."""
    first, second = (rank["dtypes.clipped_doubles"] for rank in ranks)
    for way, (distance, total) in first.items():
        assert distance < 1e-3 and total == second[way][1], way


def test_tensors_that_horovod_cannot_take_go_through_host_memory(ranks):
    """A Horovod without CUDA ends the process when it is given a CUDA tensor."""
    found = [rank["dtypes.through_host_memory"] for rank in ranks]
    assert len({each[how]["weights"] for each in found for how in each}) == 1
    assert all(each["by the host"]["asked"] > 12 for each in found), "gradients and broadcasts go this way"


def test_step_hooks_see_the_whole_step_once(ranks):
    found = ranks[0]["behaviour.step_hooks"]
    assert found["distance"] < 1e-5 and found["calls"] == [True] * 10


def test_half_precision_overflow_is_skipped(ranks):
    """Every gradient is finite, and an update is not: sent again at every step, it stopped training."""
    found = [rank["dtypes.half_overflow"] for rank in ranks]
    assert all(each["weights finite"] and each["v finite"] for each in found)
    assert found[0]["fingerprint"] == found[1]["fingerprint"] and found[0]["moved"] == found[1]["moved"]
    for each in found:
        assert not all(each["moved"][:30]) and all(each["moved"][-10:])
        assert each["skipped"] == each["moved"].count(False)
        assert each["where"] == ["no rank: an update was too large"]
        assert "an update was too large for its parameter's dtype" in each["stopped"]
    assert [len(each["said"]) for each in found] == [1, 0]
    assert "an update was too large" in found[0]["said"][0] and "a gradient was not finite" not in found[0]["said"][0]


def test_rank_zero_alone_resumes_from_a_stock_checkpoint(ranks):
    for rank in ranks:
        assert all(distance <= 1e-5 for distance in rank["behaviour.resume_on_rank_zero"].values()), rank


def test_larger_batch_identity(ranks):
    assert ranks[0]["behaviour.larger_batch_identity"]["distance"] < 1e-6


@pytest.mark.slow
def test_half_density_sends_no_more_than_dense_on_four_ranks(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    ranks = run_ranks(4, ["behaviour.half_density_bytes"], environment={"DGC_METRICS_FILE": str(metrics)}, fresh=True)
    check_metrics_file(metrics, "dgc")
    found = [rank["behaviour.half_density_bytes"] for rank in ranks]
    assert len({result["fingerprint"] for result in found}) == 1
    headers = 12 * found[0]["steps"]  # flag and step of the one bucket
    assert found[0]["bytes_sent"] <= found[0]["bytes_dense"] + headers
    assert found[0]["bytes_received"] <= found[0]["bytes_dense_received"] + 3 * headers


@pytest.mark.ranks(1)
def test_single_process_is_the_same_mathematics():
    (rank,) = run_ranks(1, ["behaviour.single_process"])
    found = rank["behaviour.single_process"]
    assert found["size"] == 1 and found["received"] == 0
    assert found["distance"] < 1e-6 and found["coupled decay, clipped"] < 1e-5
    assert found["losses"][1] < 0.7 * found["losses"][0]


@pytest.mark.ranks(3)
def test_process_set_subset():
    ranks = run_ranks(3, ["groups_of_ranks.process_set_subset"])
    found = [rank["groups_of_ranks.process_set_subset"] for rank in ranks]
    assert all(result["distance"] < 1e-5 for result in found)
    assert found[0]["fingerprint"] == found[1]["fingerprint"] != found[2]["fingerprint"]
    assert found[0]["stats"]["steps"] == 20 and found[2]["stats"] == {}


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_overlapping_process_sets():
    ranks = run_ranks(3, ["behaviour.overlapping_process_sets"])
    assert len({rank["behaviour.overlapping_process_sets"]["fingerprint"] for rank in ranks}) == 1


def test_exchange_starts_before_backward_ends(tmp_path):
    timeline = tmp_path / "timeline.json"
    metrics = tmp_path / "metrics.jsonl"
    flags, given = ("--timeline-filename", str(timeline)), {"DGC_METRICS_FILE": str(metrics)}
    run_ranks(2, ["groups_of_ranks.overlap"], launcher_flags=flags, environment=given)
    check_metrics_file(metrics, "dgc")
    text = timeline.read_text().rstrip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]}
    started: dict[str, list[int]] = {}
    for event in events:
        if event.get("ph") == "B" and str(event.get("name", "")).startswith("NEGOTIATE_"):
            started.setdefault(names[event["pid"]].removesuffix(".packets").rsplit(".", 1)[-1], []).append(event["ts"])
    steps = min(len(times) for times in started.values())
    assert steps >= 1, "the timeline holds no whole step"
    for step in range(steps):
        buckets_before = sum(started[f"bucket{i}"][step] < started["backward_ended"][step] for i in range(8))
        assert buckets_before >= 6, f"step {step}: only {buckets_before} of 8 buckets started during backward"


@pytest.mark.slow
@pytest.mark.mpi
def test_sub_communicator_through_mpi4py():
    pytest.importorskip("mpi4py", reason="extra [mpi] is not installed")
    ranks = run_ranks(3, ["groups_of_ranks.sub_communicator"], "mpi")
    inside = [rank["groups_of_ranks.sub_communicator"] for rank in ranks]
    assert [result["inside"] for result in inside] == [True, True, False]
    for result in inside[:2]:
        assert result["size"] == 2
        assert all(result[key] for key in ("u", "v", "update", "packets", "replicas")), result
