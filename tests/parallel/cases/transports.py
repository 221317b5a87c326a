"""Horovod for PyTorch as a transport, on real ranks: all of them and a part."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

from dgc_horovod.torch.horovod_carrier import HorovodCollectives
from tests.helpers.errors import error_of
from tests.helpers.transports import checked, started


def of_all() -> dict[str, bool]:
    """Horovod, all ranks."""
    hvd.init()
    transport = HorovodCollectives(hvd.global_process_set, "all")
    return checked(transport, torch.from_numpy, started(transport, torch.from_numpy))


def of_a_part() -> dict[str, bool]:
    """Horovod, ranks 1 and 2: there they are 0 and 1."""
    part = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[part])
    found = {}
    if part.included():
        transport = HorovodCollectives(part, "part")
        assert transport.workers == 2 and transport.rank == hvd.rank() - 1
        found = checked(transport, torch.from_numpy, started(transport, torch.from_numpy))
    hvd.allreduce(torch.zeros(1), name="all are through")  # a rank that ends earlier ends Horovod
    return found


def with_a_deadline() -> str:
    """What a rank says that waits in vain."""
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(3)
        return ""
    transport = HorovodCollectives(hvd.global_process_set, "late", timeout=1.0)
    said = error_of(lambda: transport.wait(transport.alltoall(torch.zeros(transport.workers), "parted")))
    time.sleep(4)  # until the other one has told: who has waited in vain ends alone, and mpirun ends all with it
    return said
