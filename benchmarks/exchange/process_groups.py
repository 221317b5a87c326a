"""The ways to exchange gradients by torch.distributed, over Gloo: DDP with its hooks, and ours with and without DDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import connections
from benchmarks.exchange.methods import MOMENTUM, Method, OwnMethod
from benchmarks.shapes import Shapes
from dgc_horovod.torch import ddp

MASTER = "EXCHANGE_MASTER"  # the variable with the address of rank 0
POWER_SGD_RANK, _POWER_SGD_START = 2, 2
_ports = iter(range(29_400, 30_000))


class ProcessGroupMethod(Method):
    """With a process group of torch.distributed, while Horovod is off."""

    sends = True

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes)
        rank, size = hvd.rank(), hvd.size()
        connections.shut_down()
        address = f"tcp://{os.environ[MASTER]}:{next(_ports)}"
        torch.distributed.init_process_group("gloo", address, world_size=size, rank=rank)

    def barrier(self) -> None:
        torch.distributed.barrier()

    def gathered(self, value: float) -> list[float]:
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, value)
        return every

    def close(self) -> None:
        torch.distributed.destroy_process_group()
        hvd.init()


class DDPMethod(ProcessGroupMethod):
    """torch's DistributedDataParallel, with a communication hook if one is given.

    Args:
        shapes: of the model.
        hook: for the communication.
        state: of the hook.
        options: more arguments of DistributedDataParallel.
    """

    def __init__(
        self, shapes: Shapes, hook: Callable[..., Any] | None = None, state: Any = None, **options: Any
    ) -> None:
        super().__init__(shapes)
        self.runs = DistributedDataParallel(self.model, init_sync=False, **options)
        if hook is not None:
            self.runs.register_comm_hook(state, hook)


class PowerSGDMethod(DDPMethod):
    """torch's own PowerSGD."""

    untimed = _POWER_SGD_START + 2

    def __init__(self, shapes: Shapes) -> None:
        state = powerSGD_hook.PowerSGDState(None, POWER_SGD_RANK, start_powerSGD_iter=_POWER_SGD_START)
        # it starts collectives in callbacks, whose order over Gloo differs between ranks as soon as there are two
        # buckets: the job then dies
        super().__init__(shapes, powerSGD_hook.powerSGD_hook, state, bucket_cap_mb=1 << 20)


def _send_nothing(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, which are strings here
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class SilentDDPMethod(DDPMethod):
    """DDP with a hook that sends nothing: the time that no hook can go below. DDP copies every gradient."""

    sends = False

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes, _send_nothing, gradient_as_bucket_view=True)


class CompressedDDPMethod(OwnMethod, DDPMethod):
    """Ours as a hook of DistributedDataParallel: Horovod's adapter and this one differ in who carries the packets."""

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes, gradient_as_bucket_view=True)  # else DDP copies every gradient twice
        plain = torch.optim.SGD(self.runs.parameters(), lr=0.1, momentum=MOMENTUM)
        self.optimizer = ddp.register(self.runs, plain, ddp.Compression.dgc(density=density))


class PlainCompressedMethod(OwnMethod, ProcessGroupMethod):
    """Ours without DDP: a hook at every parameter."""

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes)
        named = list(zip(self.model.names, self.model.tensors, strict=True))
        plain = torch.optim.SGD(self.model.tensors, lr=0.1, momentum=MOMENTUM)
        self.optimizer = ddp.DistributedOptimizer(plain, named, ddp.Compression.dgc(density=density))

    def finish(self) -> None:
        self.optimizer.synchronize()


PROCESS_GROUP_METHODS: dict[str, Callable[[Shapes, float], Method]] = {
    "torch DDP, no exchange": lambda shapes, _: SilentDDPMethod(shapes),
    "torch DDP": lambda shapes, _: DDPMethod(shapes),
    "torch DDP, fp16 hook": lambda shapes, _: DDPMethod(shapes, default_hooks.fp16_compress_hook),
    "torch DDP, PowerSGD 2": lambda shapes, _: PowerSGDMethod(shapes),
    "dgc, DDP": CompressedDDPMethod,
    "dgc, torch.distributed": PlainCompressedMethod,
}
