"""The sharded exchange on real ranks: replicas, bytes, equality to stock, what is kept."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.ranks(3)]
SHARDED = ["slots, all", "shards, all"]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(3, ["sharded.stock", "sharded.state"])


def collectives_of(file):
    """(bucket, round, microsecond asked for, microsecond done) of the collectives of a timeline, in order."""
    events = json.loads(file.read_text().rstrip().rstrip(",").removesuffix("]") + "]")
    names, found, under_way, begun = {}, [], {}, {}
    for event in events:
        pid, phase = event["pid"], event["ph"]
        if phase == "M" and "name" in event["args"]:
            names[pid] = event["args"]["name"].split(".", 1)[-1].rsplit(".", 1)
        elif phase == "B":
            under_way.setdefault(pid, []).append(event["name"])
            begun.setdefault(pid, event["ts"])
        elif phase == "E" and not under_way[pid].pop().startswith("NEGOTIATE") and not under_way[pid]:
            found.append((*names[pid], begun.pop(pid), event["ts"]))
    return sorted((each for each in found if each[1] in ("slots", "shards")), key=lambda each: each[2])


def checked(ranks, case, rounds):
    found = [rank[case] for rank in ranks]
    assert len({each["fingerprint"] for each in found}) == 1
    assert all(each["last"] < 0.5 * each["first"] for each in found), found
    assert found[0]["rounds"] == rounds and abs(found[0]["owed"]) > 1e-6


@pytest.mark.slow  # of a flat exchange: test_stress.py
def test_replicas_are_bit_identical_over_a_thousand_steps():
    checked(run_ranks(4, ["sharded.long_run"], timeout=500), "sharded.long_run", SHARDED)


def test_at_density_1_it_is_stock_horovod(ranks):
    found = ranks[0]["sharded.stock"]
    assert found["density 1"] <= 1e-5 < 1e-3 < found["compressed"]


def test_what_owners_owe_is_saved_loaded_and_flushed(ranks):
    for found in (rank["sharded.state"] for rank in ranks):
        assert found["runs"][0] == found["runs"][1]
        assert found["remainder"] > 0 and abs(found["owed"]) > 1e-6 and found["left"] == 0
        assert found["moved"] > 1e-4
    assert len({rank["sharded.state"]["replica"] for rank in ranks}) == 1


@pytest.mark.mpi
@pytest.mark.slow  # its collectives over MPI: test_transports.py
def test_over_mpi():
    checked(run_ranks(4, ["sharded.short_run"], "mpi"), "sharded.short_run", SHARDED)


@pytest.mark.slow
def test_under_keras():
    found = [rank["keras_sharded.long_run"] for rank in run_ranks(4, ["keras_sharded.long_run"])]
    assert len({each["fingerprint"] for each in found}) == 1
    for each in found:
        assert each["rounds"] == ["slots", "shards"]
        assert each["remainder"] > 0 and each["moved"] > 1e-5 and each["left"] == 0


@pytest.mark.slow
def test_bytes_and_replicas_of_eight_ranks():
    ranks = run_ranks(8, ["sharded.long_run", "sharded.volume"], timeout=900)
    checked(ranks, "sharded.long_run", SHARDED)
    for found in (rank["sharded.volume"] for rank in ranks):
        assert 1.5 * found["packet"] < found["sharded"] <= 2.3 * found["packet"] < found["flat"]


@pytest.mark.slow
def test_owners_are_nodes():
    given = {"DGC_TEST_NODES": "1", "DGC_NODE_SIZE": "2"}
    ranks = run_ranks(8, ["sharded.between_nodes"], environment=given, timeout=900, fresh=True)
    rounds = ["slots, between nodes", "shards, between nodes", "around, inside a node"]
    checked(ranks, "sharded.between_nodes", rounds)


@pytest.mark.slow
def test_what_is_owed_stays_with_other_numbers_of_ranks_and_without_owners(tmp_path):
    before = None
    for workers, exchange in ((4, "sharded"), (3, "sharded"), (4, "flat"), (4, "sharded"), (2, "sharded")):
        given = {"SHARDED_EXCHANGE": exchange}
        ranks = run_ranks(workers, ["sharded.saved"], environment=given, folder=tmp_path)
        found = [rank["sharded.saved"] for rank in ranks]
        assert len({each["fingerprint"] for each in found}) == 1
        assert (found[0]["rounds"] == SHARDED) == (exchange == "sharded" and workers > 2)
        if before is not None:
            assert found[0]["before"] == pytest.approx(before, rel=1e-5)
        before = found[0]["after"]
        assert all(abs(part) > 1e-3 for part in before)


@pytest.mark.slow
def test_second_rounds_begin_while_first_rounds_of_other_buckets_are_under_way(tmp_path):
    """By Horovod's own timeline of rank 0: when each collective was asked for, and when it was done."""
    given = {"HOROVOD_TIMELINE": str(tmp_path / "timeline.json")}
    steps = run_ranks(4, ["sharded.several_buckets"], environment=given, fresh=True)[0]["sharded.several_buckets"]
    spans = collectives_of(tmp_path / "timeline.json")
    buckets = {bucket for bucket, _, _, _ in spans}
    assert len(buckets) >= 6 and len(spans) == 2 * len(buckets) * steps
    overlapping, gaps = 0, []
    for step in range(steps):
        of_step = spans[2 * len(buckets) * step :][: 2 * len(buckets)]
        slots, shards = ({b: (begin, end) for b, kind, begin, end in of_step if kind == k} for k in ("slots", "shards"))
        assert len(slots) == len(shards) == len(buckets), "two collectives of a bucket a step"
        gaps += [shards[bucket][0] - slots[bucket][1] for bucket in buckets]
        overlapping += min(begin for begin, _ in shards.values()) < max(end for _, end in slots.values())
    print(f"from the end of a first round to the request of the second: {statistics.median(gaps) / 1e3:.2f} ms")
    assert min(gaps) >= 0, "one round follows another"
    assert overlapping >= steps / 2, overlapping


@pytest.mark.ranks(3, last=1)
def test_a_rank_that_is_missing_in_the_second_round_is_an_error_not_a_hang():
    ranks = run_ranks(3, ["sharded.missing_between_rounds"], timeout=90, environment={"DGC_TIMEOUT": "3"}, last=True)
    for found in (rank["sharded.missing_between_rounds"] for rank in ranks[:2]):
        assert re.match(r"CollectiveTimeout: rank \d of 3 waited 3 s for dgc\..*\.shards", found["error"]), found
        assert found["seconds"] < 7
