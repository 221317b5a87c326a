"""The ways to exchange gradients that are timed: each a backward pass that hands gradients over, and a wait."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import connections
from benchmarks.exchange.published import PublishedExchange
from benchmarks.shapes import Shapes
from dgc_horovod.torch import Compression, DistributedOptimizer, ddp

MASTER = "EXCHANGE_MASTER"  # the variable with the address of rank 0
MOMENTUM = 0.9
_STAGES = 8  # of the backward pass; gradients of later tensors are there first, as in a model
POWER_SGD_RANK, _POWER_SGD_START = 2, 2


class _Handover(torch.autograd.Function):
    """A stage of a network whose backward pass costs nothing: it hands over gradients that are there already."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], before: torch.Tensor, *parameters: Any) -> torch.Tensor:
        ctx.gradients = gradients
        return before.clone()

    @staticmethod
    def backward(ctx: Any, *outgoing: Any) -> Any:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        given = tuple(gradients)
        gradients.clear()  # autograd takes over what nobody else holds, and copies the rest
        return None, outgoing[0], *given


class GivenGradients(torch.nn.Module):
    """A model of given shapes; its backward pass puts given tensors into ``p.grad``."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.names = [name for name, _ in shapes]
        # zeros that are never read take up no memory
        self.tensors = [torch.nn.Parameter(torch.from_numpy(np.zeros(shape, np.float32))) for _, shape in shapes]
        for i, parameter in enumerate(self.tensors):  # names of modules have no dots
            self.register_parameter(str(i), parameter)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """A loss whose gradients are `gradients`, which is emptied."""
        loss = torch.zeros((), requires_grad=True)
        count = math.ceil(len(gradients) / _STAGES)
        parts = [gradients[i : i + count] for i in range(0, len(gradients), count)]
        gradients.clear()
        for number, part in enumerate(parts):
            loss = _Handover.apply(part, loss, *self.tensors[number * count : number * count + len(part)])
        return loss


class Method:
    """No exchange at all: the time that no method can go below.

    Args:
        shapes: of the model.
    """

    untimed = 0  # first steps that are unlike the others

    def __init__(self, shapes: Shapes) -> None:
        self.model = GivenGradients(shapes)
        self.runs: torch.nn.Module = self.model

    @property
    def gradients(self) -> list[torch.Tensor]:
        """What stands in ``p.grad``, flat."""
        return [p.grad.view(-1) for p in self.model.tensors if p.grad is not None]

    def clear(self) -> None:
        """Before a step."""
        self.model.zero_grad(set_to_none=True)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """A loss whose backward pass hands over `gradients`."""
        return self.runs(gradients)  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Wait until every ``p.grad`` is what the optimizer may apply."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        hvd.barrier()

    def gathered(self, value: float) -> list[float]:
        """Every rank's `value`."""
        return hvd.allgather(torch.tensor([value], dtype=torch.float64), name="value").tolist()  # type: ignore[no-any-return]

    def close(self) -> None:
        """After the last step. The next method has connections of its own: after seconds of dense gradients the same
        ones are slower for all that follows."""
        connections.shut_down()
        hvd.init()

    def phases(self) -> dict[str, float]:
        """Seconds of the method's own work so far, by what it was."""
        return {}


class HorovodMethod(Method):
    """Horovod's DistributedOptimizer, stock or ours, until just before it applies what it has exchanged."""

    def __init__(self, shapes: Shapes, compression: Any) -> None:
        super().__init__(shapes)
        named = list(zip(self.model.names, self.model.tensors, strict=True))
        plain = torch.optim.SGD(self.model.tensors, lr=0.1, momentum=MOMENTUM)
        self.optimizer: Any = DistributedOptimizer(plain, named, compression=compression)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def finish(self) -> None:
        self.optimizer.synchronize()


class CompressedMethod(HorovodMethod):
    """Ours; it knows where its time goes."""

    untimed = 6  # until the guess of the threshold is near

    def phases(self) -> dict[str, float]:
        traffic = self.optimizer._dgc.collectives.traffic
        return {"compress": traffic.compressing, "decode": traffic.decoding, "wait": traffic.waiting}


class PublishedMethod(Method):
    """The public code of Lin et al., tensor by tensor."""

    untimed = 2

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes)
        named = list(zip(self.model.names, self.model.tensors, strict=True))
        self.exchange = PublishedExchange(named, density, MOMENTUM)

    def finish(self) -> None:
        self.exchange.synchronize()

    def phases(self) -> dict[str, float]:
        return dict(self.exchange.seconds)


class DDPMethod(Method):
    """torch's DistributedDataParallel over Gloo, with a communication hook if one is given; Horovod is off meanwhile.

    Args:
        shapes: of the model.
        hook: for the communication.
        state: of the hook; the hook then approximates.
        options: more arguments of DistributedDataParallel.
    """

    _next_port = 29_400

    def __init__(
        self, shapes: Shapes, hook: Callable[..., Any] | None = None, state: Any = None, **options: Any
    ) -> None:
        super().__init__(shapes)
        rank, size = hvd.rank(), hvd.size()
        connections.shut_down()
        address = f"tcp://{os.environ[MASTER]}:{DDPMethod._next_port}"
        DDPMethod._next_port += 1
        torch.distributed.init_process_group("gloo", address, world_size=size, rank=rank)
        self.approximate = state is not None
        self.untimed = _POWER_SGD_START + 2 if self.approximate else 0
        # PowerSGD starts collectives in callbacks, whose order over Gloo differs between ranks as soon as there are
        # two buckets: the job then dies
        bucket = {"bucket_cap_mb": 1 << 20} if self.approximate else {}
        self.runs = DistributedDataParallel(self.model, init_sync=False, **bucket, **options)
        if hook is not None:
            self.runs.register_comm_hook(state, hook)

    def barrier(self) -> None:
        torch.distributed.barrier()

    def gathered(self, value: float) -> list[float]:
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, value)
        return every

    def close(self) -> None:
        torch.distributed.destroy_process_group()
        hvd.init()


class CompressedDDPMethod(DDPMethod):
    """Ours as a hook of DistributedDataParallel: Horovod's adapter and this one differ in who carries the packets."""

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes, gradient_as_bucket_view=True)  # else DDP copies every gradient twice
        self.untimed = CompressedMethod.untimed
        plain = torch.optim.SGD(self.runs.parameters(), lr=0.1, momentum=MOMENTUM)
        self.optimizer = ddp.register(self.runs, plain, ddp.Compression.dgc(density=density))

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def phases(self) -> dict[str, float]:
        traffic = self.optimizer._dgc.collectives.traffic
        return {"compress": traffic.compressing, "decode": traffic.decoding, "wait": traffic.waiting}


def _power_sgd(shapes: Shapes) -> Method:
    state = powerSGD_hook.PowerSGDState(None, POWER_SGD_RANK, start_powerSGD_iter=_POWER_SGD_START)
    return DDPMethod(shapes, powerSGD_hook.powerSGD_hook, state)


def _compressed(**fields: Any) -> Callable[[Shapes, float], Method]:
    return lambda shapes, density: CompressedMethod(shapes, Compression.dgc(density=density, **fields))


NOTHING = "no exchange"
METHODS: dict[str, Callable[[Shapes, float], Method]] = {
    NOTHING: lambda shapes, _: Method(shapes),
    "dense": lambda shapes, _: HorovodMethod(shapes, Compression.none),
    "fp16": lambda shapes, _: HorovodMethod(shapes, Compression.fp16),
    "dgc": _compressed(),
    "dgc, 4-bit values": _compressed(values="4bit"),
    "dgc, sampled": _compressed(rule="sampled"),
    "dgc, gaussian": _compressed(rule="gaussian"),
    "published DGC": PublishedMethod,
    "torch DDP": lambda shapes, _: DDPMethod(shapes),
    "torch DDP, fp16 hook": lambda shapes, _: DDPMethod(shapes, default_hooks.fp16_compress_hook),
    "dgc, DDP": CompressedDDPMethod,
    "torch DDP, PowerSGD 2": lambda shapes, _: _power_sgd(shapes),
}
