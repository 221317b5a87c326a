"""torch.distributed as a transport, on real ranks: all of them and a part, and what a rank says that waits in vain."""

from __future__ import annotations

import gc
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from dgc_horovod.torch.ddp import Compression, register, save_checkpoint
from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, _agreed_name, new_group
from tests.helpers.errors import error_of
from tests.helpers.transports import checked, started


def of_all() -> dict[str, bool]:
    """All ranks."""
    transport = ProcessGroupCollectives(new_group(range(dist.get_world_size()), 60), "all")
    return checked(transport, torch.from_numpy, started(transport, torch.from_numpy))


def of_a_part() -> dict[str, bool]:
    """Ranks 1 and 2, which alone make the group: there they are 0 and 1. One of them is in more groups of torch."""
    if dist.get_rank() == 0:
        return {}
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    transport = ProcessGroupCollectives(new_group([1, 2], 60), "part")
    assert transport.workers == 2 and transport.rank == dist.get_rank() - 1
    return checked(transport, torch.from_numpy, started(transport, torch.from_numpy))


def texts() -> list[list[str]]:
    """Bytes of any length, none among them; and means with factors around them."""
    transport = ProcessGroupCollectives(new_group(range(dist.get_world_size()), 60), "texts")
    found = transport.gather_bytes(b"x" * 5 * transport.rank, "texts")
    mean = transport.wait(transport.allreduce(torch.full((2,), 1.0 + transport.rank), "mean", True, (0.5, 2.0)))
    return [[text.decode() for text in found], [str(float(x)) for x in mean]]


def with_a_deadline() -> str:
    """What a rank says that waits in vain."""
    transport = ProcessGroupCollectives(new_group([0, 1], 30), "late", timeout=1.0)
    if transport.rank == 0:
        time.sleep(2)
        transport.wait(transport.alltoall(torch.zeros(transport.workers), "parted"))
        return ""
    return error_of(lambda: transport.wait(transport.alltoall(torch.zeros(transport.workers), "parted")))


def says_that_one_is_gone() -> str:
    """What a rank says whose partner has gone, and then ends with."""
    transport = ProcessGroupCollectives(new_group([0, 1], 30), "gone")
    if transport.rank == 0:
        os._exit(0)
    transport.wait(transport.allgather(torch.zeros(4), "gathered"))
    return ""


def again_and_again(times: int = 6) -> list[list[int]]:
    """Descriptors, threads and process groups after one optimizer, and after many that are gone."""
    found = []
    for _ in range(2):
        for _ in range(times):
            model = DistributedDataParallel(nn.Linear(40, 40))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            register(model, optimizer, Compression.dgc(0.05, exchange="hierarchical", node_size=1))
            model(torch.ones(4, 40)).square().mean().backward()
            optimizer.step()
            save_checkpoint(os.environ["DGC_TEST_FOLDER"], model, optimizer)
        del model, optimizer
        gc.collect()
        dist.barrier()
        known = dist.distributed_c10d.get_pg_count()
        found.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), known])
    return found


def again_and_again_150() -> list[list[int]]:
    """As `again_and_again`, 300 times in all."""
    return again_and_again(150)


def after_dead_processes() -> dict[str, bool]:
    """A store in which others have connected before, as torchrun gives it to the processes that it starts again."""
    new_group([0, 1], 60)
    store, rank = dist.PrefixStore("dgc/0,1", _get_default_store()), dist.get_rank()
    if rank == 0:
        store.set("1", "drawn-by-a-dead-process")
        store.set("answer", "dead drawn-by-a-dead-process")
        dist.barrier()
        time.sleep(1)  # the other rank reads what the dead one has written
    else:
        dist.barrier()
    transport = ProcessGroupCollectives(new_group([0, 1], 60), "again")
    return checked(transport, torch.from_numpy, started(transport, torch.from_numpy))


def never_connects() -> tuple[float, str]:
    """What a rank says where another one has come, and then ends before it connects."""
    os.environ["DGC_TIMEOUT"], begin = "3", time.monotonic()
    if dist.get_rank() == 1:
        _agreed_name(dist.PrefixStore("dgc/0,1", _get_default_store()), 1, [0, 1], begin + 60)
        time.sleep(8)
        return 0, ""
    said = error_of(lambda: new_group([0, 1], 45))
    return time.monotonic() - begin, said
