"""Small tensors (bias, norm) that are in no bucket: an allreduce each, which Horovod fuses, or one of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from dgc_horovod.torch.gradients.collectives import Collectives, Pending

Parameter = torch.Tensor


@dataclass(frozen=True)
class ReduceSettings:
    """How the gradients of all ranks are combined.

    Args:
        averages: whether gradients are averaged (True) or summed.
        gradient_predivide_factor: divisor of the gradients before the sum, made good after it, > 0.
        sparse_as_dense: whether sparse gradients are made dense.
    """

    averages: bool
    gradient_predivide_factor: float = 1.0
    sparse_as_dense: bool = False

    @property
    def scales(self) -> tuple[float, float]:
        """Factors before and after the sum."""
        factor = self.gradient_predivide_factor
        return (1 / factor, factor) if self.averages else (1.0, 1.0)


def laid_out_as(result: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """`result` in the dtype and memory format of `grad`: fused optimizers walk both in memory order."""
    if grad.is_sparse or grad.stride() == result.stride():
        return result.to(grad.dtype)
    return torch.empty_like(grad).copy_(result)


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every element is finite; the host waits once for each device, not for each tensor."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for x in tensors:
        flags.setdefault(x.device, []).append(torch.isfinite(x).all())
    return all(bool(torch.stack(each).all()) for each in flags.values())


def not_finite_of(names: Mapping[torch.Tensor, str]) -> str:
    """The name of the first of these tensors that is not finite; "" if all are. Costs a read of each."""
    return "" if all_finite(names) else next(name for x, name in names.items() if not all_finite([x]))


class DensePath:
    """The dense tensors of one optimizer, and how far this step has come.

    Args:
        names: name of each dense parameter.
        collectives: transport of this optimizer's group.
        settings: Horovod's arguments.
        loss_scale: function that gives the present factor of the gradients, > 0.
        residuals: see `OptimizerExchange.dense_residuals`; they go with the next step.
        half: whether gradients travel as fp16, as with Horovod's own Compression.fp16.
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
        self._pending: dict[Parameter, Pending] = {}
        self._waiting: dict[Parameter, torch.Tensor] = {}  # where small collectives are not put together: for one
        self._results: dict[Parameter, torch.Tensor] = {}

    @property
    def complete(self) -> bool:
        """Whether every tensor's gradient is here."""
        return len(self.gradients) == len(self.names)

    @property
    def pending(self) -> list[Pending]:
        """What is under way."""
        return list(self._pending.values())

    def launch(self, p: Parameter, clip: float = 1.0) -> None:
        """Start the allreduce of ``clip * gradient``, of a copy: autograd may have given that memory to others too."""
        gradient = self.gradients[p]
        if gradient.dtype == torch.bfloat16:  # Horovod's torch operations refuse it
            gradient = gradient.float()
        gradient = (gradient * clip).contiguous()
        residual = self._residuals.get(self.names[p])
        if residual is not None:
            gradient = gradient + torch.from_numpy(residual).view(p.shape).to(gradient) * self._loss_scale()
        if self._half:
            gradient = gradient.half()
        if self.collectives.by_name:
            self._pending[p] = self._reduced(gradient, self.names[p])
            return
        self._waiting[p] = gradient
        if len(self._waiting) == len(self.names):
            self._launch_together()

    def launch_all(self, clip: float = 1.0) -> None:
        """`launch` of every tensor, in one order on all ranks."""
        for p in self.names:
            self.launch(p, clip)

    def _launch_together(self) -> None:
        """One allreduce for each dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
        for p in self.names:
            alike.setdefault((self._waiting[p].dtype, self._waiting[p].device), []).append(p)
        for (dtype, _), parameters in alike.items():
            flat = torch.cat([self._waiting[p].view(-1) for p in parameters])
            self._pending.update(dict.fromkeys(parameters, self._reduced(flat, str(dtype))))
        self._waiting.clear()

    def _reduced(self, gradient: torch.Tensor, name: str) -> Pending:
        self.collectives.traffic.count_allreduce(gradient.nbytes, self.collectives.workers)
        settings = self.settings
        return self.collectives.allreduce(gradient, f"dense.{name}", settings.averages, *settings.scales)

    def result(self, p: Parameter) -> torch.Tensor:
        """Wait for the allreduce; what belongs into ``p.grad``, in its dtype."""
        assert p.grad is not None
        if p not in self._results:
            pending = self._pending[p]
            together = [p] if self.collectives.by_name else [q for q, its in self._pending.items() if its is pending]
            parts = self.collectives.wait(pending).view(-1).split([q.numel() for q in together])
            self._results.update(zip(together, parts, strict=True))
        return laid_out_as(self._results[p].view(p.shape), p.grad)

    @property
    def finite(self) -> bool:
        """Whether every result of this step is finite; the same on every rank."""
        return all_finite(self._results.values())

    def clear(self) -> None:
        """Forget the step."""
        self.gradients.clear()
        self._pending.clear()
        self._waiting.clear()
        self._results.clear()
