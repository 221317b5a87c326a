"""The loss scale of an unmodified script, found by observing its uses of GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from dgc_horovod.errors import UnsupportedUse

_NOT_TOLD = (
    "the GradScaler of this step is not the one that has scaled the loss of its gradients, so that residuals would be "
    "of different scales: two GradScalers drive this optimizer, or scale() was not called, or in compiled code. Call "
    "scale() and step() of one GradScaler in a step, or pass grad_scaler=scaler to DistributedOptimizer"
)


class _ScaledPass:
    """The last backward pass through a loss that a GradScaler has scaled; one for the process, as the class is."""

    def __init__(self) -> None:
        self._number, self._under_way = -1, False
        self._scaler: GradScaler | None = None

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler of the present backward pass; a checkpoint's own pass has that of the pass around it."""
        return self._scaler if self._under_way or self._number == torch._C._current_graph_task_id() else None

    def begins(self, scaler: GradScaler) -> None:
        """Note a pass through a loss of `scaler`, until its end."""
        self._number, self._under_way, self._scaler = torch._C._current_graph_task_id(), True, scaler
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)  # type: ignore[attr-defined]

    def _ends(self) -> None:
        self._under_way = False


_scaled_pass = _ScaledPass()


class SeenScaler:
    """The GradScaler that has scaled the loss of an optimizer's present step, if there is one.

    The backward pass of the step's first gradient tells it. A step without a backward pass on this rank (in join, or
    without a batch) has the scaler of the step before.

    Attributes:
        scaler: that of the present step, or of the last one.
    """

    def __init__(self) -> None:
        self.scaler: GradScaler | None = None
        self._has_gradients = False

    def is_enabled(self) -> bool:
        """Return True: a script's scaler is only known once it is used."""
        return True

    def get_scale(self) -> float:
        """Return the factor of the present gradients."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def begin_step(self, has_gradients: bool) -> None:
        """Begin a step, in a backward pass or later; `has_gradients`: whether one has reached the optimizer."""
        in_backward = torch._C._current_graph_task_id() != -1
        self._has_gradients = has_gradients or in_backward
        if in_backward:
            self.scaler = _scaled_pass.scaler

    def driven_by(self, scaler: GradScaler) -> None:
        """Note that `scaler` unscales or steps the optimizer.

        Raises:
            UnsupportedUse: it has not scaled the loss of the step's gradients.
        """
        if self._has_gradients and self.scaler is not scaler:
            raise UnsupportedUse(_NOT_TOLD)
        self.scaler = scaler


def watch_scalers() -> None:
    """Observe every use of a GradScaler from now on."""
    for name, seen in (("scale", _scaling), ("unscale_", _driving), ("step", _driving)):
        method = getattr(GradScaler, name)
        if not hasattr(method, "__wrapped__"):
            setattr(GradScaler, name, functools.wraps(method)(seen(method)))


def _scaling(method: Callable[..., Any]) -> Callable[..., Any]:
    def scale(scaler: GradScaler, outputs: Any) -> Any:
        losses = method(scaler, outputs)
        if not torch.compiler.is_compiling():
            for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
                if isinstance(loss, torch.Tensor) and loss.requires_grad:
                    loss.register_hook(lambda _: _scaled_pass.begins(scaler))
        return losses

    return scale


def _driving(method: Callable[..., Any]) -> Callable[..., Any]:
    def drive(scaler: GradScaler, optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
        seen = getattr(getattr(optimizer, "_dgc", None), "scaler", None)
        if isinstance(seen, SeenScaler) and scaler.is_enabled():
            seen.driven_by(scaler)
        return method(scaler, optimizer, *args, **kwargs)

    return drive


def known(scaler: GradScaler | SeenScaler | None) -> GradScaler | None:
    """Return the script's GradScaler, if it is known."""
    return scaler.scaler if isinstance(scaler, SeenScaler) else scaler


def already_unscaled(scaler: GradScaler | SeenScaler | None, optimizer: Optimizer) -> bool:
    """Return whether a GradScaler has unscaled the gradients of `optimizer` in this step."""
    states = getattr(known(scaler), "_per_optimizer_states", {})
    stage = states[id(optimizer)].get("stage") if id(optimizer) in states else None
    return getattr(stage, "name", "") == "UNSCALED"


def scale_of(grad_scaler: GradScaler | SeenScaler | None) -> Callable[[], float]:
    """Return a function that returns the present factor of the gradients, 1 without a scaler."""
    if grad_scaler is None:
        return lambda: 1.0
    return lambda: float(grad_scaler.get_scale())
