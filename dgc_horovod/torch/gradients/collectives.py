"""Collectives of torch tensors with a deadline; a bucket, and the tensors that are in none, in the present step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dgc_horovod import envvars
from dgc_horovod.config_check import cut
from dgc_horovod.core.engine import BucketEngine
from dgc_horovod.errors import CollectiveTimeout
from dgc_horovod.notices import timed_out
from dgc_horovod.stats import Traffic

_FIRST_PAUSE, _LONGEST_PAUSE = 5e-5, 1e-3  # seconds between two polls; Horovod's own cycle is 1 ms
Parameter = torch.Tensor


@dataclass(frozen=True)
class Pending:
    """A collective under way.

    Args:
        handle: handle of the transport; None with one worker.
        result: result of the collective, if there is no handle, or if the transport writes to this tensor.
        name: full name of the collective.
        home: tensor that gets a result of its size, if a copy on the host was sent; else None.
        factor: factor of the result, for a transport that has none.
    """

    handle: Any
    result: torch.Tensor
    name: str
    home: torch.Tensor | None = None
    factor: float = 1.0


Scales = tuple[float, float]  # factors before and after a sum
UNSCALED: Scales = 1.0, 1.0
# function of the tensor to send and the collective's full name; returns handle and `Pending.result`
Start = Callable[[torch.Tensor, str], tuple[Any, torch.Tensor]]


class Collectives(ABC):
    """`contract.Transport` for one optimizer: the collectives of one group of workers.

    Args:
        rank: index of this worker in the group, 0 <= rank < workers.
        workers: N >= 1; with 1 nothing is sent.
        tag: prefix of every name; names are fixed over the run, so that Horovod's response cache always hits.
        timeout: seconds to wait for other ranks, > 0; None: DGC_TIMEOUT.
    """

    failures: tuple[type[Exception], ...] = ()  # exceptions of a collective after another rank has ended
    # Whether collectives match by name, for any order of starts, and the transport fuses small ones. If not, every rank
    # must start the same collectives in the same order.
    by_name = True
    pads = False  # whether the buffers of an allgather must have one size

    def __init__(self, rank: int, workers: int, tag: str, timeout: float | None = None) -> None:
        self.rank, self.workers, self.tag = rank, workers, tag
        self.traffic = Traffic()
        self._timeout = timeout or envvars.timeout_seconds()

    @abstractmethod
    def allgather(self, packet: torch.Tensor, name: str) -> Pending:
        """Start an allgather of vectors; the result has them in rank order."""

    @abstractmethod
    def alltoall(self, tensor: torch.Tensor, name: str) -> Pending:
        """Start an exchange of N equal parts of a vector; the result has the received parts in rank order."""

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, name: str, averages: bool = False, scales: Scales = UNSCALED) -> Pending:
        """Start a sum or mean over ranks of ``scales[0] * tensor``, times ``scales[1]``; in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, name: str, root: int = 0) -> Pending:
        """Start a broadcast, in place, from rank `root` of the group."""

    @abstractmethod
    def _is_done(self, handle: Any) -> bool:
        """Return whether the collective is done."""

    @abstractmethod
    def _result(self, pending: Pending) -> torch.Tensor:
        """Return the result of a collective that is done."""

    def _timed_out(self, text: str) -> CollectiveTimeout:
        return CollectiveTimeout(text)

    def _begun(self, tensor: torch.Tensor, name: str, start: Start, factor: float = 1.0) -> Pending:
        """Begin a collective of this optimizer by `start`; with one worker nothing is sent."""
        full_name = f"dgc.{self.tag}.{name}"
        if self.workers == 1:
            return Pending(None, tensor, full_name)
        sent, home = (tensor.cpu(), tensor) if self.stages(tensor) else (tensor, None)
        return Pending(*start(sent, full_name), full_name, home, factor)

    def gather_bytes(self, data: bytes, name: str) -> list[bytes]:
        """Gather the `data` of every rank, of any length, in rank order. Blocks; two collectives."""
        lengths = torch.tensor([len(data)], dtype=torch.int64)
        sizes = self.wait(self.allgather(lengths, f"{name}.lengths")).tolist()
        own = np.zeros(max(1, *sizes) if self.pads else len(data), np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        found = self.wait(self.allgather(torch.from_numpy(own), name)).numpy().tobytes()
        parts = cut(found, [own.size] * len(sizes) if self.pads else sizes)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def meet(self, name: str) -> None:  # noqa: B027 - nothing by default
        """Wait for every rank before collectives that one rank may call alone, if collectives match by order."""

    def stages(self, tensor: torch.Tensor) -> bool:
        """Return whether a collective of `tensor` copies it to the host when it starts, and waits for its device."""
        return False

    def done(self, pending: Pending) -> bool:
        """Return whether `wait` would return at once."""
        return pending.handle is None or self._is_done(pending.handle)

    def wait(self, pending: Pending) -> torch.Tensor:
        """Wait for a collective, also of another group of this rank (see `Carrier.of_nodes`); return its result.

        Raises:
            CollectiveTimeout: it did not finish within DGC_TIMEOUT seconds.
        """
        if pending.handle is None:
            return pending.result
        deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
        with self.traffic.timing("waiting"):
            while not self._is_done(pending.handle):
                if time.monotonic() > deadline:
                    raise self._timed_out(timed_out(self.rank, self.workers, pending.name, self._timeout))
                time.sleep(pause)
                pause = min(1.1 * pause, _LONGEST_PAUSE)  # a tenth of the time waited so far
            result = self._result(pending)
            if pending.factor != 1:
                result.mul_(pending.factor)
        home = pending.home  # the result of an allgather is larger, and stays on the host
        return result if home is None or home.numel() != result.numel() else home.copy_(result)


@dataclass(frozen=True)
class ReduceSettings:
    """The reduction of the gradients of all ranks.

    Args:
        averages: whether gradients are averaged (True) or summed.
        gradient_predivide_factor: divisor of the gradients before the sum and factor after it, > 0.
        sparse_as_dense: whether sparse gradients are made dense.
    """

    averages: bool
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False


def laid_out_as(result: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `result` in the dtype and memory format of `grad`, as fused optimizers read both in memory order."""
    if grad.is_sparse or grad.stride() == result.stride():
        return result.to(grad.dtype)
    return torch.empty_like(grad).copy_(result)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether every element is finite; the host waits once for each device, not for each tensor."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for x in tensors:
        flags.setdefault(x.device, []).append(torch.isfinite(x).all())
    return all(bool(torch.stack(each).all()) for each in flags.values())


def not_finite_of(names: Mapping[torch.Tensor, str]) -> str:
    """Return the name of the first tensor that is not finite, or "". Cost: a read of each tensor."""
    return "" if all_finite(names) else next(name for x, name in names.items() if not all_finite([x]))


@dataclass
class BucketRun:
    """A bucket, its parameters in segment order, and its progress in the present step."""

    engine: BucketEngine
    parameters: tuple[Parameter, ...]
    arrived: int = 0  # number of gradients
    pending: Pending | None = None
    finite: bool | None = None  # None until the ranks' messages are back
    outputs: list[torch.Tensor] = field(default_factory=list)  # memory that the engine writes each update to
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # streams that its gradients were computed on

    def __post_init__(self) -> None:
        self.sizes = [segment.numel for segment in self.engine.whole.segments]
        self.device = self.parameters[0].device  # of all of them, at wrapping

    @property
    def complete(self) -> bool:
        """Whether every gradient is there."""
        return self.arrived == len(self.parameters)


class DensePath:
    """The dense tensors of one optimizer, and their progress in the present step.

    Args:
        names: name of each dense parameter.
        collectives: transport of this optimizer's group.
        settings: Horovod's arguments.
        loss_scale: function that returns the present factor of the gradients, > 0.
        residuals: see `OptimizerExchange.dense_residuals`; they are sent with the next step.
        half: whether gradients are sent as fp16, as with Horovod's own Compression.fp16.
    """

    def __init__(
        self,
        names: Mapping[Parameter, str],
        collectives: Collectives,
        settings: ReduceSettings,
        loss_scale: Callable[[], float],
        residuals: Mapping[str, np.ndarray],
        half: bool,
    ) -> None:
        self.names, self.collectives, self.settings, self._half = names, collectives, settings, half
        self._loss_scale, self._residuals = loss_scale, residuals
        self.gradients: dict[Parameter, torch.Tensor] = {}
        self.pending: dict[Parameter, Pending] = {}  # collectives under way
        # for the others and a common allreduce, if the transport fuses none; else until a device may be waited for
        self.waiting: dict[Parameter, torch.Tensor] = {}
        self._results: dict[Parameter, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether every tensor's gradient is there."""
        return len(self.gradients) == len(self.names)

    def launch(self, p: Parameter, clip: float = 1.0) -> None:
        """Start the allreduce of a copy of ``clip * gradient``, or leave it to `launch_waiting`.

        Autograd may share the gradient's memory.
        """
        gradient = self.gradients[p]
        if gradient.dtype == torch.bfloat16:  # Horovod's torch operations do not support it
            gradient = gradient.float()
        gradient = (gradient * clip).contiguous()
        residual = self._residuals.get(self.names[p])
        if residual is not None:
            gradient = gradient + torch.from_numpy(residual).view(p.shape).to(gradient) * self._loss_scale()
        if self._half:
            gradient = gradient.half()
        self.waiting[p] = gradient.view(-1)
        if self.collectives.by_name and not self.collectives.stages(gradient):  # else it holds up the backward pass
            self.launch_waiting()

    def launch_waiting(self) -> None:
        """Start the allreduces that `launch` has left; the host may wait for the device.

        If the transport fuses none, all tensors must be there: one allreduce is started for each dtype and device.
        """
        averages, factor = self.settings.averages, self.settings.gradient_predivide_factor
        alike: dict[object, list[Parameter]] = {}
        for p, gradient in self.waiting.items():
            alike.setdefault(p if self.collectives.by_name else (gradient.dtype, gradient.device), []).append(p)
        for first, *others in alike.values():
            flat = torch.cat([self.waiting[p] for p in (first, *others)]) if others else self.waiting[first]
            self.collectives.traffic.count_allreduce(flat.nbytes, self.collectives.workers)
            name = self.names[first] if self.collectives.by_name else flat.dtype
            pending = self.collectives.allreduce(flat, f"dense.{name}", averages, (1 / factor, factor))
            self.pending.update(dict.fromkeys((first, *others), pending))
        self.waiting.clear()

    def result(self, p: Parameter) -> torch.Tensor:
        """Wait for the allreduce; return the update for ``p.grad``, in its dtype."""
        assert p.grad is not None
        if p not in self._results:
            pending = self.pending[p]
            together = [p] if self.collectives.by_name else [q for q, its in self.pending.items() if its is pending]
            parts = self.collectives.wait(pending).view(-1).split([q.numel() for q in together])
            self._results.update(zip(together, parts, strict=True))
        return laid_out_as(self._results[p].view(p.shape), p.grad)

    @property
    def finite(self) -> bool:
        """Whether every result of this step is finite; the same on every rank."""
        return all_finite(self._results.values())

    def clear(self) -> None:
        """Discard the step."""
        self.gradients.clear()
        self.pending.clear()
        self.waiting.clear()
        self._results.clear()
