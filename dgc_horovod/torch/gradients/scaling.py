"""The loss scale of an unmodified script, found by observing its uses of GradScaler."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

_SEEN = ("scale", "unscale_", "step", "update")  # methods of GradScaler that are wrapped; `stop_watching` restores them


class _Uses:
    """The uses of GradScalers in this process; the methods of their class are wrapped once.

    Attributes:
        stepping: the scaler whose `step` is under way.
        at: time of a scaler's last scaled loss since its `update`, and of the end of an optimizer's last step.
        ticks: a logical clock.
    """

    def __init__(self) -> None:
        self.stepping: GradScaler | None = None
        self.ticks = itertools.count(1)
        self.at: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._newest: Callable[[], GradScaler | None] = lambda: None  # the scaler that has scaled a loss last
        # the last backward pass through a scaled loss, and the loss's scaler
        self._pass: tuple[int, Callable[[], GradScaler | None]] = -1, lambda: None
        # the scaler that drives an optimizer; None: its last step was without a scaler
        self._drivers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[GradScaler] | None]
        self._drivers = weakref.WeakKeyDictionary()

    # -- queries

    def of_step(self, optimizer: Optimizer) -> GradScaler | None:
        """Return the scaler of the gradients of the present step."""
        if self.stepping is not None:
            return self.stepping
        if _in_backward() and self._pass[0] == torch._C._current_graph_task_id():
            return self._pass[1]()
        driver, newest = self._driver_of(optimizer), self._newest()
        if driver is not None and self._has_scaled_for(optimizer, driver):
            return driver
        if newest is not None and self._has_scaled_for(optimizer, newest):
            return None if self._is_for_others(newest, optimizer) else newest
        return self.of_last_step(optimizer) if _has_no_loss(optimizer) else None

    def of_last_step(self, optimizer: Optimizer) -> GradScaler | None:
        """Return the scaler of the last step; without one, the scaler that scaled a loss last."""
        if optimizer in self._drivers and self._drivers[optimizer] is None:
            return None
        return self._driver_of(optimizer) or self._newest()

    def _driver_of(self, optimizer: Optimizer) -> GradScaler | None:
        reference = self._drivers.get(optimizer)
        return reference() if reference is not None else None

    def _has_scaled_for(self, optimizer: Optimizer, scaler: GradScaler) -> bool:
        return self.at.get(scaler, 0) > self.at.get(optimizer, 0)

    def _is_for_others(self, scaler: GradScaler, optimizer: Optimizer) -> bool:
        """Return whether the last loss scaled by `scaler`, which does not drive `optimizer`, is for other optimizers.

        One loss may be for two optimizers. Its backward pass is over when the first of them is stepped, even if the
        exchange of the other begins later.
        """
        others = [other for other in self._drivers if other is not optimizer and self._driver_of(other) is scaler]
        if optimizer in self._drivers and self._drivers[optimizer] is None:
            return bool(others)
        return _in_backward() and any(self.at.get(other, 0) > self.at[scaler] for other in others)

    # -- events

    def stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Record a step of an optimizer; a step hook."""
        if self.stepping is not None:  # perhaps the step of an optimizer around this one
            self._drivers[optimizer] = weakref.ref(self.stepping)
        elif not already_unscaled(self._driver_of(optimizer), optimizer):
            self._drivers[optimizer] = None
        self.at[optimizer] = next(self.ticks)

    def noticed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap `method` of GradScaler to record its calls."""

        @functools.wraps(method)
        def noticed(scaler: GradScaler, *args: object, **kwargs: object) -> Any:
            optimizer = args[0] if args else kwargs.get("optimizer")
            if isinstance(optimizer, Optimizer):
                self._drivers[optimizer] = weakref.ref(scaler)
            elif name == "scale" and torch.is_grad_enabled():  # else for evaluation, which has no backward pass
                self._newest, self.at[scaler] = weakref.ref(scaler), next(self.ticks)
            elif name == "update":  # gradients from before the update are not stepped any more
                self.at.pop(scaler, None)
            if name != "step":
                result = method(scaler, *args, **kwargs)
                if name == "scale" and not torch.compiler.is_compiling():
                    self._mark(result, scaler)
                return result
            before, self.stepping = self.stepping, scaler
            try:
                result = method(scaler, *args, **kwargs)
            finally:
                self.stepping = before
            if isinstance(optimizer, Optimizer):  # no hook of the optimizer runs if `scaler` skips the step
                self.at[optimizer] = next(self.ticks)
            return result

        return noticed

    def _mark(self, losses: object, scaler: GradScaler) -> None:
        """Record `scaler` when a backward pass goes through any of `losses`."""
        reference = weakref.ref(scaler)

        def passes(_: torch.Tensor) -> None:
            self._pass = torch._C._current_graph_task_id(), reference

        for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.register_hook(passes)


_uses = _Uses()  # one for the process, as the class GradScaler is


class SeenScaler:
    """The GradScaler that has scaled the loss of an optimizer's present step, if there is one.

    A backward pass through a scaled loss has the scaler of that loss. For any other backward pass (fp32, or a reentrant
    checkpoint's own) a scaler counts if it has scaled a loss since the optimizer's last step and since its own last
    ``update``. The scaler that last stepped or unscaled the optimizer comes first, then the scaler that last scaled a
    loss. The latter is taken to be for other optimizers only if it drives others while this optimizer's last step was
    without a scaler, or if it has stepped another optimizer before this backward pass.

    A step without a backward pass on this rank (in join, or without a batch) has the scaler of the step before.

    It is wrong in two cases: at the first step of an optimizer in fp32, if another optimizer's loss is scaled before
    its backward pass and stepped after it; and at the first scaled step after steps in fp32, if the scaler already
    drives another optimizer.
    """

    def __init__(self) -> None:
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
        self._found: Callable[[], GradScaler | None] = lambda: None  # the scaler of the last backward pass
        self._found_at = 0

    def belongs_to(self, optimizer: Optimizer) -> None:
        """Observe `optimizer`, the wrapped one, from now on."""
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_post_hook(_uses.stepped)

    def is_enabled(self) -> bool:
        """Return True: a script's scaler is only known once it is used."""
        return True

    def get_scale(self) -> float:
        """Return the factor of the present gradients."""
        scaler = self._of_step()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _of_step(self) -> GradScaler | None:
        """Return the scaler of the present step; the result of a backward pass holds until the end of its step."""
        optimizer, in_backward = self._optimizer(), _in_backward()
        if optimizer is None:
            return None
        if _uses.stepping is None and not in_backward and self._found_at > _uses.at.get(optimizer, 0):
            return self._found()
        found = _uses.of_step(optimizer)
        if in_backward:
            self._found, self._found_at = weakref.ref(found) if found is not None else lambda: None, next(_uses.ticks)
        return found

    def of_last_step(self) -> GradScaler | None:
        """Return the scaler of the last step, also if it has not scaled a loss since."""
        optimizer = self._optimizer()
        return _uses.of_last_step(optimizer) if optimizer is not None else None


def _in_backward() -> bool:
    """Return whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def _has_no_loss(optimizer: Optimizer) -> bool:
    """Return whether no backward pass on this rank has reached an optimizer in the present step."""
    session = getattr(optimizer, "_dgc", None)  # None while the optimizer is being wrapped
    if session is None or session.exchange.in_join:
        return session is not None
    return session.passes.none_yet and not session.carrier.exchanges_in_backward


def watch_scalers() -> None:
    """Record every use of a GradScaler from now on."""
    for name in _SEEN:
        method = getattr(GradScaler, name)
        if not hasattr(method, "__wrapped__"):
            setattr(GradScaler, name, _uses.noticed(method, name))


def stop_watching() -> None:
    """Restore torch's own methods."""
    for name in _SEEN:
        setattr(GradScaler, name, getattr(getattr(GradScaler, name), "__wrapped__", getattr(GradScaler, name)))


def known(scaler: GradScaler | SeenScaler | None) -> GradScaler | None:
    """Return the script's GradScaler, if it is known."""
    return scaler.of_last_step() if isinstance(scaler, SeenScaler) else scaler


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
