"""One suite over every transport: Horovod for PyTorch, torch.distributed, ranks of one process.

Horovod for TensorFlow: test_keras_transports.py.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from dgc_horovod.testing.loopback import Board, Loopback
from tests.helpers.adapters import Adapter, Compression, on_adapters
from tests.helpers.errors import error_of
from tests.helpers.jobs import run
from tests.helpers.launchers import torchrun
from tests.helpers.transports import check, started

pytestmark = [pytest.mark.parallel, pytest.mark.on_ranks(2)]
on_ddp = on_adapters("DDP")


def _transport(adapter: Adapter, name: str, ranks: Any = None, **options: Any) -> Any:
    """Of all ranks, or of some."""
    if adapter.kind == "torch":
        from dgc_horovod.torch.horovod_carrier import HorovodCollectives

        return HorovodCollectives(ranks or adapter.ranks.global_process_set, name, **options)
    from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, new_group

    group = new_group(ranks or range(adapter.ranks.get_world_size()), 60)
    return ProcessGroupCollectives(group, name, **options)


@on_adapters("Horovod", "DDP")
def test_of_all_ranks(adapter):
    check(_transport(adapter, "all"), torch.from_numpy)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.on_ranks(2, controller="mpi")
@on_adapters("Horovod")
def test_over_mpi(adapter):
    check(_transport(adapter, "all"), torch.from_numpy)


@pytest.mark.on_ranks(3)
@on_adapters("Horovod", slow=("DDP",))
def test_of_a_part_of_the_ranks(adapter):
    """Ranks 1 and 2: there they are 0 and 1. With torch.distributed one of them is in more groups of torch."""
    part: Any = [1, 2]
    if adapter.kind == "torch":
        part = adapter.ranks.ProcessSet([1, 2])
        adapter.ranks.init(process_sets=[part])
    elif adapter.rank == 1:
        adapter.ranks.new_group([1], use_local_synchronization=True)
    if adapter.rank > 0:
        transport = _transport(adapter, "part", part)
        assert transport.workers == 2 and transport.rank == adapter.rank - 1
        check(transport, torch.from_numpy)
    adapter.barrier()  # a rank that ends earlier ends Horovod


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ddp
def test_texts_and_means_of_torch_distributed(adapter, workers):
    """Bytes of any length, none among them; and means with factors around them."""
    transport = _transport(adapter, "texts")
    assert transport.gather_bytes(b"x" * 5 * transport.rank, "texts") == [b"x" * 5 * rank for rank in range(workers)]
    mean = transport.wait(transport.allreduce(torch.full((2,), 1.0 + transport.rank), "mean", True, (0.5, 2.0)))
    assert mean.tolist() == 2 * [(workers + 1) / 2]


@pytest.mark.parametrize("times", [6, pytest.param(150, marks=pytest.mark.slow)])
@on_ddp
def test_connections_of_torch_distributed_end_with_their_optimizer(adapter, times, tmp_path):
    """Each register() left a process group, five descriptors and three threads behind."""
    found = []
    for _ in range(2):
        for _ in range(times):
            compression = Compression.dgc(0.05, exchange="hierarchical", node_size=1)
            model, optimizer = adapter.made(compression, inner=nn.Linear(40, 40))
            model(torch.ones(4, 40)).square().mean().backward()
            optimizer.step()
            adapter.module.save_checkpoint(tmp_path, model, optimizer)
        del model, optimizer
        gc.collect()
        adapter.ranks.barrier()
        known = adapter.ranks.distributed_c10d.get_pg_count()
        found.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), known])
    assert found[0] == found[1]


@on_ddp
def test_torch_distributed_in_a_store_of_processes_that_are_dead(adapter):
    """A rank connected to the address of a dead one, which another attempt of torchrun had left in the store."""
    from torch.distributed.distributed_c10d import _get_default_store

    _transport(adapter, "before")
    if adapter.rank == 0:
        store = adapter.ranks.PrefixStore("dgc/0,1", _get_default_store())
        store.set("1", "drawn-by-a-dead-process")
        store.set("answer", "dead drawn-by-a-dead-process")
    adapter.ranks.barrier()
    if adapter.rank == 0:
        time.sleep(1)  # the other rank reads what the dead one has written
    check(_transport(adapter, "again"), torch.from_numpy)


@pytest.mark.slow
@pytest.mark.on_ranks(2, fresh=True, environment={"DGC_TIMEOUT": "3"})
@on_ddp
def test_torch_distributed_with_a_rank_that_never_connects(adapter):
    """It waited as long as a collective may, and Gloo sometimes longer; the other one ends before it connects."""
    from torch.distributed.distributed_c10d import _get_default_store

    from dgc_horovod.torch.ddp.transport import _agreed_name, new_group

    begin = time.monotonic()
    if adapter.rank == 1:
        _agreed_name(adapter.ranks.PrefixStore("dgc/0,1", _get_default_store()), 1, [0, 1], begin + 60)
        time.sleep(8)
        return
    error = error_of(lambda: new_group([0, 1], 45))
    assert "CollectiveTimeout: rank 0 waited" in error and "no connection to every rank within 3 s" in error, error
    assert 3 <= time.monotonic() - begin < 40


def says_that_one_is_gone() -> None:
    """On a rank of a job whose first rank ends."""
    transport = _transport(Adapter("DDP"), "gone")
    if transport.rank == 0:
        os._exit(0)
    transport.wait(transport.allgather(torch.zeros(4), "gathered"))


@pytest.mark.on_ranks(0)
@pytest.mark.ranks(2, "ddp")
def test_torch_distributed_when_a_rank_has_ended():
    program = "import torch.distributed as dist; dist.init_process_group('gloo')\n"
    program += "from tests.parallel.test_transports import says_that_one_is_gone; says_that_one_is_gone()"
    code, log = run([*torchrun(2), "--no-python", sys.executable, "-c", program])
    assert code and "rank 1 of 2: dgc.gone.gathered has failed, as another rank has ended" in log


@pytest.mark.on_ranks(0)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_ranks_of_one_process(number):
    board = Board()
    transports = [Loopback(rank, number, board) for rank in range(number)]
    under_way = [started(transport, torch.from_numpy) for transport in transports]
    for transport, mine in zip(transports, under_way, strict=True):
        check(transport, torch.from_numpy, mine)
