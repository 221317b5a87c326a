"""The ways to exchange gradients that are timed: each a backward pass that hands gradients over, and a wait.

By Horovod; by torch.distributed over Gloo: DDP with its hooks, and ours with and without DDP; and by the public DGC
code (Lin et al.), written anew.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import connections
from benchmarks.baselines import PublishedDGC
from benchmarks.kernels.bench import Stream
from benchmarks.shapes import Shapes, numel
from dgc_horovod.config import EXCHANGES
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer, ddp
from dgc_horovod.torch.session.session import session_of
from dgc_horovod.torch.wrapping import clip_calls

MOMENTUM, RATE = 0.9, 0.1
MASTER = "EXCHANGE_MASTER"  # the variable with the address of rank 0
POWER_SGD_RANK, _POWER_SGD_START = 2, 2
_STAGES = 8  # of the backward pass; gradients of later tensors are there first, as in a model
_ports = iter(range(29_400, 30_000))


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
    sends = False

    def __init__(self, shapes: Shapes) -> None:
        self.model = GivenGradients(shapes)
        self.runs: torch.nn.Module = self.model

    @property
    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters."""
        return list(zip(self.model.names, self.model.tensors, strict=True))

    def sgd(self) -> torch.optim.Optimizer:
        """SGD with momentum on all parameters."""
        return torch.optim.SGD(self.model.tensors, lr=RATE, momentum=MOMENTUM)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The tensors in ``p.grad``, flat."""
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
        """After the last step; Horovod is off then."""
        connections.shut_down()

    def phases(self) -> dict[str, float]:
        """Seconds of the method's own work so far, by what it was."""
        return {}


class MemoryMethod(Method):
    """The time of memory alone: u and v read and written, the gradient read, then zeroed for the update; 24 bytes a
    parameter. Nothing is selected and nobody is talked to."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes)
        self._loop = Stream(numel(shapes))

    def finish(self) -> None:
        start = 0
        for gradient in self.gradients:
            self._loop.run(gradient.numpy(), start)
            start += gradient.numel()
        for gradient in self.gradients:
            gradient.zero_()


class HorovodMethod(Method):
    """Horovod's DistributedOptimizer, stock or ours, until just before it applies what it has exchanged."""

    sends = True

    def __init__(self, shapes: Shapes, compression: Any) -> None:
        super().__init__(shapes)
        self.optimizer: Any = DistributedOptimizer(self.sgd(), self.named, compression=compression)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def finish(self) -> None:
        self.optimizer.synchronize()


class OwnMethod(Method):
    """Ours; it knows where its time goes."""

    untimed = 6  # until the guess of the threshold is near
    optimizer: Any

    def clear(self) -> None:
        # as step() does: no norm is measured for a script that has clipped nothing
        clip_calls.end_step(session_of(self.optimizer))
        self.optimizer.zero_grad()

    def phases(self) -> dict[str, float]:
        traffic = session(self.optimizer).exchange.collectives.traffic
        return {"compress": traffic.compressing, "decode": traffic.decoding, "wait": traffic.waiting}


class CompressedMethod(OwnMethod, HorovodMethod):
    """Ours on Horovod."""


class PublishedMethod(Method):
    """The public DGC code, tensor by tensor: two allgathers a tensor, eager torch, no coding.

    When a gradient is there, it selects by a sampled threshold and starts one allgather of fp32 values and one of int64
    indices; when the step is finished, it zeroes ``p.grad``, adds what all ranks sent by ``index_put_`` and divides by
    N. Tensors of one dimension go by an allreduce.
    """

    untimed, sends = 2, True

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes)
        compressed = [(name, tuple(p.shape)) for name, p in self.named if p.dim() > 1]
        self._number = {name: i for i, (name, _) in enumerate(compressed)}
        self._flow = PublishedDGC([shape for _, shape in compressed], density, MOMENTUM)
        self.k = sum(self._flow.k)
        self._handles: dict[str, tuple[int, ...]] = {}
        self._seconds = {"compress": 0.0, "wait": 0.0, "decode": 0.0}
        for name, p in self.named:
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._ready(name, p))  # type: ignore[misc]

    @torch.no_grad()
    def _ready(self, name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        start = time.perf_counter()
        if name in self._number:
            values, indices = self._flow.compress(self._number[name], p.grad.reshape(-1))
            started = [hvd.allgather_async(values, name=f"{name}.t0"), hvd.allgather_async(indices, name=f"{name}.t1")]
            self._handles[name] = tuple(started)
        else:
            self._handles[name] = (hvd.allreduce_async_(p.grad, name=name, op=hvd.Average),)
        self._seconds["compress"] += time.perf_counter() - start

    @torch.no_grad()
    def finish(self) -> None:
        for name, p in self.named:
            assert p.grad is not None
            start = time.perf_counter()
            received = [hvd.synchronize(handle) for handle in self._handles.pop(name)]
            waited = time.perf_counter()
            if name in self._number:
                values, indices = received
                p.grad.zero_()
                p.grad.view(-1).index_put_([indices], values, accumulate=True)
                p.grad.mul_(1 / hvd.size())
            self._seconds["wait"] += waited - start
            self._seconds["decode"] += time.perf_counter() - waited

    def phases(self) -> dict[str, float]:
        return dict(self._seconds)


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
        self.optimizer = ddp.register(self.runs, self.sgd(), ddp.Compression.dgc(density=density))


class PlainCompressedMethod(OwnMethod, ProcessGroupMethod):
    """Ours without DDP: a hook at every parameter."""

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes)
        self.optimizer = ddp.DistributedOptimizer(self.sgd(), self.named, ddp.Compression.dgc(density=density))

    def finish(self) -> None:
        self.optimizer.synchronize()


def _compressed(**fields: Any) -> Callable[[Shapes, float], Method]:
    return lambda shapes, density: CompressedMethod(shapes, Compression.dgc(density=density, **fields))


NOTHING, MEMORY = "no exchange", "memory alone"  # of which nothing is an exchange
METHODS: dict[str, Callable[[Shapes, float], Method]] = {
    NOTHING: lambda shapes, _: Method(shapes),
    MEMORY: lambda shapes, _: MemoryMethod(shapes),
    "dense": lambda shapes, _: HorovodMethod(shapes, Compression.none),
    "fp16": lambda shapes, _: HorovodMethod(shapes, Compression.fp16),
    "dgc": _compressed(),
    "dgc, 4-bit values": _compressed(values="4bit"),
    "dgc, sampled": _compressed(rule="sampled"),
    "dgc, gaussian": _compressed(rule="gaussian"),
    "published DGC": PublishedMethod,
    "torch DDP, no exchange": lambda shapes, _: SilentDDPMethod(shapes),
    "torch DDP": lambda shapes, _: DDPMethod(shapes),
    "torch DDP, fp16 hook": lambda shapes, _: DDPMethod(shapes, default_hooks.fp16_compress_hook),
    "torch DDP, PowerSGD 2": lambda shapes, _: PowerSGDMethod(shapes),
    "dgc, DDP": CompressedDDPMethod,
    "dgc, torch.distributed": PlainCompressedMethod,
}
# on hosts of several ranks: ours with each exchange
NODE_METHODS = {
    **{name: METHODS[name] for name in (NOTHING, "dense")},
    **{name: _compressed(exchange=name) for name in EXCHANGES if name != "auto"},
}
