"""torch.distributed as a transport, on real ranks: all of them and a part, and what a rank says that waits in vain."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from dgc_horovod.torch.ddp.transport import ProcessGroupCollectives, new_group
from tests.helpers.errors import error_of
from tests.helpers.transports import checked, started


def of_all() -> dict[str, bool]:
    """All ranks."""
    transport = ProcessGroupCollectives(new_group(range(dist.get_world_size()), 60), "all")
    return checked(transport, torch.from_numpy, started(transport, torch.from_numpy))


def of_a_part() -> dict[str, bool]:
    """Ranks 1 and 2, which alone make the group: there they are 0 and 1."""
    if dist.get_rank() == 0:
        return {}
    transport = ProcessGroupCollectives(new_group([1, 2], 60), "part")
    assert transport.workers == 2 and transport.rank == dist.get_rank() - 1
    return checked(transport, torch.from_numpy, started(transport, torch.from_numpy))


def texts() -> list[list[str]]:
    """Bytes of any length, none among them; and means with factors around them."""
    transport = ProcessGroupCollectives(new_group(range(dist.get_world_size()), 60), "texts")
    found = transport.gather_bytes(b"x" * 5 * transport.rank, "texts")
    mean = transport.wait(transport.allreduce(torch.full((2,), 1.0 + transport.rank), "mean", True, 0.5, 2.0))
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
