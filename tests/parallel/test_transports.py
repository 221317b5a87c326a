"""One suite over every transport: Horovod for PyTorch and for TensorFlow, torch.distributed, ranks of one process."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quality.simulation import Board, Loopback
from tests.helpers.ranks import run_ranks
from tests.helpers.transports import checked, expected, started

pytestmark = pytest.mark.parallel
COLLECTIVES = sorted(expected(0, 1))


def assert_all(found: dict[str, bool]) -> None:
    assert sorted(found) == COLLECTIVES and all(found.values()), found


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovod_and_torch_distributed(controller):
    cases = ["of_all", "with_a_deadline"] if controller == "mpi" else ["of_all", "torch_distributed", "with_a_deadline"]
    for number, rank in enumerate(run_ranks(2, [f"transports.{case}" for case in cases], controller)):
        said = rank.pop("transports.with_a_deadline")
        assert (number == 0) != ("CollectiveTimeout" in said and "waited 1 s" in said), said
        for found in rank.values():
            assert_all(found)


def test_a_transport_of_a_part_of_the_ranks_is_a_transport():
    first, *others = (rank["transports.of_a_part"] for rank in run_ranks(3, ["transports.of_a_part"], fresh=True))
    assert first == {}
    for found in others:
        assert_all(found)


def test_horovod_for_tensorflow():
    for rank in run_ranks(2, ["keras_transports.of_all"]):
        assert_all(rank["keras_transports.of_all"]["eager"])
        assert_all(rank["keras_transports.of_all"]["graph"])


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_ranks_of_one_process(workers):
    board = Board()
    transports = [Loopback(rank, workers, board) for rank in range(workers)]
    under_way = [started(transport, torch.from_numpy) for transport in transports]
    for transport, mine in zip(transports, under_way, strict=True):
        assert_all(checked(transport, torch.from_numpy, mine))
