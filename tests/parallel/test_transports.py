"""One suite over every transport: Horovod for PyTorch and for TensorFlow, torch.distributed, ranks of one process."""

from __future__ import annotations

import sys

import pytest
import torch

from dgc_horovod.testing.loopback import Board, Loopback
from tests.helpers.jobs import run
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_ranks import run_torch_ranks, torchrun
from tests.helpers.transports import checked, expected, started

pytestmark = pytest.mark.parallel
COLLECTIVES = sorted(expected(0, 1))


def assert_all(found: dict[str, bool]) -> None:
    assert sorted(found) == COLLECTIVES and all(found.values()), found


@pytest.mark.ranks(2, last=1)
@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_horovod_for_torch(controller):
    cases = ["of_all", "with_a_deadline"]
    for number, rank in enumerate(run_ranks(2, [f"transports.{case}" for case in cases], controller)):
        said = rank.pop("transports.with_a_deadline")
        assert (number == 0) != ("CollectiveTimeout" in said and "waited 1 s" in said), said
        for found in rank.values():
            assert_all(found)


@pytest.mark.ranks(3)
def test_a_transport_of_a_part_of_the_ranks_is_a_transport():
    first, *others = (rank["transports.of_a_part"] for rank in run_ranks(3, ["transports.of_a_part"]))
    assert first == {}
    for found in others:
        assert_all(found)


@pytest.mark.ranks(2, "ddp")
def test_torch_distributed():
    for rank in run_torch_ranks(2, ["ddp_transports.of_all", "ddp_transports.texts"]):
        assert_all(rank["ddp_transports.of_all"])
        assert rank["ddp_transports.texts"] == [["", "xxxxx"], ["1.5", "1.5"]]


@pytest.mark.slow
@pytest.mark.ranks(3, "ddp")
def test_torch_distributed_on_a_part_of_three_ranks():
    for number, rank in enumerate(run_torch_ranks(3, ["ddp_transports.of_a_part", "ddp_transports.texts"])):
        assert rank["ddp_transports.texts"] == [["", "xxxxx", "xxxxxxxxxx"], ["2.0", "2.0"]]
        if number:
            assert_all(rank["ddp_transports.of_a_part"])


@pytest.mark.slow  # by the optimizer: test_ddp_around.py
def test_torch_distributed_with_a_deadline():
    late = run_torch_ranks(2, ["ddp_transports.with_a_deadline"], fresh=True)[1]["ddp_transports.with_a_deadline"]
    assert "CollectiveTimeout" in late and "rank 1 of 2 waited 1 s for dgc.late.parted" in late


@pytest.mark.ranks(2, "ddp")
def test_connections_of_torch_distributed_end_with_their_optimizer(tmp_path):
    """Each register() left a process group, five descriptors and three threads behind."""
    for before, after in results_of_cycles("again_and_again", tmp_path):
        assert after == before


@pytest.mark.slow
def test_connections_of_torch_distributed_end_300_times(tmp_path):
    for before, after in results_of_cycles("again_and_again_150", tmp_path):
        assert after == before


def results_of_cycles(case, folder):
    found = run_torch_ranks(2, [f"ddp_transports.{case}"], 280, folder=folder)
    return [rank[f"ddp_transports.{case}"] for rank in found]


@pytest.mark.ranks(2, "ddp")
def test_torch_distributed_in_a_store_of_processes_that_are_dead():
    """A rank connected to the address of a dead one, which another attempt of torchrun had left in the store."""
    for rank in run_torch_ranks(2, ["ddp_transports.after_dead_processes"]):
        assert_all(rank["ddp_transports.after_dead_processes"])


@pytest.mark.slow
def test_torch_distributed_with_a_rank_that_never_connects():
    """It waited as long as a collective may, and Gloo sometimes longer."""
    seconds, said = run_torch_ranks(2, ["ddp_transports.never_connects"], fresh=True)[0][
        "ddp_transports.never_connects"
    ]
    assert "CollectiveTimeout: rank 0 waited" in said and "no connection to every rank within 3 s" in said, said
    assert 3 <= seconds < 40


@pytest.mark.ranks(2, "ddp")
def test_torch_distributed_when_a_rank_has_ended():
    program = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
    program += "from tests.parallel.cases.ddp_transports import says_that_one_is_gone; says_that_one_is_gone()"
    code, log = run([*torchrun(2), "--no-python", sys.executable, "-c", program])
    assert code and "rank 1 of 2: dgc.gone.gathered has failed, as another rank has ended" in log


@pytest.mark.ranks(2, "keras")
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
