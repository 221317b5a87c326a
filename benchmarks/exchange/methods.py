"""The ways to exchange gradients that are timed: each a backward pass that hands gradients over, and a wait."""

from __future__ import annotations

import math
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from benchmarks import connections
from benchmarks.exchange.published import PublishedExchange
from benchmarks.kernels.bench import Stream
from benchmarks.shapes import Shapes, numel
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import DistributedOptimizer
from dgc_horovod.torch.clipping import calls

MOMENTUM = 0.9
_STAGES = 8  # of the backward pass; gradients of later tensors are there first, as in a model


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


class MemoryMethod(Method):
    """What memory alone takes: u and v read and written, the gradient read, then zeroed for the update; 24 bytes a
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
        named = list(zip(self.model.names, self.model.tensors, strict=True))
        plain = torch.optim.SGD(self.model.tensors, lr=0.1, momentum=MOMENTUM)
        self.optimizer: Any = DistributedOptimizer(plain, named, compression=compression)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def finish(self) -> None:
        self.optimizer.synchronize()


class OwnMethod(Method):
    """Ours; it knows where its time goes."""

    untimed = 6  # until the guess of the threshold is near
    optimizer: Any

    def clear(self) -> None:
        calls.end_step(self.optimizer)  # as step() does: no norm is measured for a script that has clipped nothing
        self.optimizer.zero_grad()

    def phases(self) -> dict[str, float]:
        traffic = session(self.optimizer).exchange.collectives.traffic
        return {"compress": traffic.compressing, "decode": traffic.decoding, "wait": traffic.waiting}


class CompressedMethod(OwnMethod, HorovodMethod):
    """Ours on Horovod."""


class PublishedMethod(Method):
    """The public code of Lin et al., tensor by tensor."""

    untimed, sends = 2, True

    def __init__(self, shapes: Shapes, density: float) -> None:
        super().__init__(shapes)
        named = list(zip(self.model.names, self.model.tensors, strict=True))
        self.exchange = PublishedExchange(named, density, MOMENTUM)

    def finish(self) -> None:
        self.exchange.synchronize()

    def phases(self) -> dict[str, float]:
        return dict(self.exchange.seconds)
