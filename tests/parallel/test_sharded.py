"""The sharded exchange on real ranks: replicas, bytes, equality to stock, what is kept by owners of elements."""

from __future__ import annotations

import re
import statistics
import time
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers.adapters import Adapter
from tests.helpers.errors import error_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.timeline import operations
from tests.helpers.training import smooth_model, train
from tests.parallel import test_nodes

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(3)]
SHARDED = ["slots, all", "shards, all"]


def _wrapped(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, **settings: Any) -> Any:
    config = Compression.dgc(**{"density": 0.05, "exchange": "sharded", **settings})
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr, momentum), model.named_parameters(), config)


def _check_run(steps: int, rounds: list[str], **fields: Any) -> None:
    run = test_nodes.check_replicas(Adapter("Horovod"), steps, **{"density": 0.05, "exchange": "sharded", **fields})
    assert [f"{each.name}, {each.group}" for each in run.compressed[0].exchange.rounds] == rounds
    assert abs(run.owed()[0]) > 1e-6


@pytest.mark.slow  # of a flat exchange: test_stress.py; collectives over MPI: test_transports.py
@pytest.mark.on_ranks(timeout=900)
@pytest.mark.parametrize(
    ("controller", "workers", "steps"),
    [("gloo", 4, 1000), ("gloo", 8, 1000), pytest.param("mpi", 4, 100, marks=pytest.mark.mpi)],
)
def test_replicas_are_bit_identical_over_a_thousand_steps(controller, workers, steps):
    _check_run(steps, SHARDED)


@pytest.mark.slow
@pytest.mark.on_ranks(8, timeout=900, fresh=True, environment={"DGC_TEST_NODES": "1", "DGC_NODE_SIZE": "2"})
def test_owners_are_nodes():
    hvd.init()
    rounds = ["slots, between nodes", "shards, between nodes", "around, inside a node"]
    _check_run(300, rounds, exchange="hierarchical+sharded", node_size=2)


def several_buckets() -> None:
    """On a rank: forty steps of a model whose tensors are in six buckets."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    head = nn.Sequential(nn.Linear(32, 256), model, nn.Linear(256, 1))
    train(head, _wrapped(head, lr=1e-3, momentum=0.0, density=0.01, bucket_bytes=4 * 256 * 256), 40)


def _collectives_of(file: Any) -> list[tuple[str, str, float, float]]:
    """(bucket, round, microsecond asked for, microsecond done) of the collectives of a timeline, in order."""
    found = [(*name.split(".", 1)[-1].rsplit(".", 1), asked, done) for name, asked, done in operations(file)]
    return sorted((each for each in found if each[1] in ("slots", "shards")), key=lambda each: each[2])


@pytest.mark.slow
@pytest.mark.on_ranks(0)
def test_second_rounds_begin_while_first_rounds_of_other_buckets_are_under_way(tmp_path):
    """By Horovod's own timeline of rank 0: when each collective was asked for, and when it was done."""
    timeline, steps = tmp_path / "timeline.json", 40
    on_ranks(several_buckets, 4, environment={"HOROVOD_TIMELINE": str(timeline)}, fresh=True)
    spans = _collectives_of(timeline)
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


@pytest.mark.on_ranks(3, last=1, environment={"DGC_TIMEOUT": "3"})
def test_a_rank_that_is_missing_in_the_second_round_is_an_error_not_a_hang():
    """The last one takes part in the first round of a step, and stays away from the second."""
    model = smooth_model()
    optimizer = _wrapped(model)
    train(model, optimizer, 2)
    is_last = hvd.rank() == hvd.size() - 1
    if is_last:
        (engine,) = [each for each in session(optimizer).exchange.engines if not each.bucket.uncompressed]

        def stay_away(received: Any) -> None:
            time.sleep(8)
            raise RuntimeError("away")

        engine.receive = stay_away
    start = time.monotonic()
    error = error_of(lambda: train(model, optimizer, 1))
    seconds = time.monotonic() - start
    time.sleep(2)  # who ends first would end Horovod for the others, whose own time is not up yet
    if not is_last:
        assert re.match(r"CollectiveTimeout: rank \d of 3 waited 3 s for dgc\..*\.shards", error), error
        assert seconds < 7
