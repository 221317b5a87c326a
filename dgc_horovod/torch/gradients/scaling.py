"""The loss scale of a script that nobody has edited: its GradScalers are seen when they are used."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

_SEEN = (
    "scale",
    "unscale_",
    "step",
    "update",
)  # methods of GradScaler that are wrapped, and put back by `stop_watching`


class _Uses:
    """What scripts of this process have done with GradScalers, whose class is wrapped once for all of them.

    Attributes:
        stepping: the scaler whose `step` is under way.
        at: when a scaler has scaled a loss last, if it was after its `update`, and when an optimizer's last step ended.
        ticks: a clock.
    """

    def __init__(self) -> None:
        self.stepping: GradScaler | None = None
        self.ticks = itertools.count(1)
        self.at: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._last: weakref.ref[GradScaler] | None = None  # the one that has scaled a loss last
        # the last backward pass that went through a scaled loss, and whose scaler's
        self._pass: tuple[int, Callable[[], GradScaler | None]] = -1, lambda: None
        # an optimizer's scaler, None: none
        self._drivers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[GradScaler] | None]
        self._drivers = weakref.WeakKeyDictionary()

    # -- what is found out

    def of_step(self, optimizer: Optimizer) -> GradScaler | None:
        """The scaler that has scaled the gradients of the step under way."""
        if self.stepping is not None:
            return self.stepping
        if _in_backward() and self._pass[0] == torch._C._current_graph_task_id():
            return self._pass[1]()
        driver, newest = self._driver_of(optimizer), self._newest
        if driver is not None and self._has_scaled_for(optimizer, driver):
            return driver
        if newest is not None and self._has_scaled_for(optimizer, newest):
            return None if self._is_for_others(newest, optimizer) else newest
        return self.of_last_step(optimizer) if _has_no_loss(optimizer) else None

    def of_last_step(self, optimizer: Optimizer) -> GradScaler | None:
        """That of the last step; where it is gone, or before the first step, the one that scaled a loss last."""
        if optimizer in self._drivers and self._drivers[optimizer] is None:
            return None
        return self._driver_of(optimizer) or self._newest

    def _driver_of(self, optimizer: Optimizer) -> GradScaler | None:
        reference = self._drivers.get(optimizer)
        return reference() if reference is not None else None

    @property
    def _newest(self) -> GradScaler | None:
        return self._last() if self._last is not None else None

    def _has_scaled_for(self, optimizer: Optimizer, scaler: GradScaler) -> bool:
        return self.at.get(scaler, 0) > self.at.get(optimizer, 0)

    def _is_for_others(self, scaler: GradScaler, optimizer: Optimizer) -> bool:
        """Whether the last loss that `scaler`, not the driver of `optimizer`, has scaled seems to be another's.

        One loss may be for two. Its backward pass is over when the first of them is stepped, even if the exchange of
        the other begins later.
        """
        others = [other for other in self._drivers if other is not optimizer and self._driver_of(other) is scaler]
        if optimizer in self._drivers and self._drivers[optimizer] is None:
            return bool(others)
        return _in_backward() and any(self.at.get(other, 0) > self.at[scaler] for other in others)

    # -- what is noticed

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has stepped: a hook of it."""
        if self.stepping is not None:  # perhaps of an optimizer around this one
            self._drivers[optimizer] = weakref.ref(self.stepping)
        elif not already_unscaled(self._driver_of(optimizer), optimizer):
            self._drivers[optimizer] = None
        self.at[optimizer] = next(self.ticks)

    def noticed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`method` of GradScaler, whose calls are noticed."""

        @functools.wraps(method)
        def noticed(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            optimizer = args[0] if args else kwargs.get("optimizer")
            if isinstance(optimizer, Optimizer):
                self._drivers[optimizer] = weakref.ref(scaler)
            elif name == "scale" and torch.is_grad_enabled():  # else for evaluation, which has no backward pass
                self._last, self.at[scaler] = weakref.ref(scaler), next(self.ticks)
            elif name == "update":  # no gradient that is still to be stepped has the scale of before
                self.at.pop(scaler, None)
            if name == "step":
                return self._step(scaler, optimizer, lambda: method(scaler, *args, **kwargs))
            result = method(scaler, *args, **kwargs)
            if name == "scale" and not torch.compiler.is_compiling():
                self._mark(result, scaler)
            return result

        return noticed

    def _mark(self, losses: Any, scaler: GradScaler) -> None:
        """Let the backward pass through any of `losses` be known for that of `scaler`."""
        reference = weakref.ref(scaler)

        def passes(_: torch.Tensor) -> None:
            self._pass = torch._C._current_graph_task_id(), reference

        for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.register_hook(passes)

    def _step(self, scaler: GradScaler, optimizer: object, step: Callable[[], Any]) -> Any:
        """Call `step`, which `scaler` may skip; no hook of the optimizer runs then."""
        before, self.stepping = self.stepping, scaler
        try:
            result = step()
        finally:
            self.stepping = before
        if isinstance(optimizer, Optimizer):
            self.at[optimizer] = next(self.ticks)
        return result


_uses = _Uses()  # of this process: GradScaler is one class for all of its optimizers


class SeenScaler:
    """Stands for the GradScaler that has scaled the loss of the present step of an optimizer, if one has.

    Of a backward pass that goes through a loss that a scaler has scaled it is that scaler. Of another one (in fp32, or
    a reentrant checkpoint's own), a scaler counts if it has scaled a loss since the optimizer's last step, and since
    its own last ``update``. First comes the one that has stepped or unscaled the optimizer last, then the one that has
    scaled a loss last. That one may be for other optimizers only: so it is taken to be if it drives others while this
    one's last step was without a scaler, and if it has stepped another before this backward pass.

    A step without a backward pass on this rank (in join, or without a batch) has the scaler of the step before.

    Two cases remain in which it errs. The first step of an optimizer in fp32, where another's scaled loss comes before
    its own backward pass and is stepped after it. And the first scaled step after some in fp32, where the scaler drives
    another optimizer already.
    """

    def __init__(self) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._found: weakref.ref[GradScaler] | None = None  # what a backward pass has found last
        self._found_at = 0

    def belongs_to(self, optimizer: Optimizer) -> None:
        """From now on watch `optimizer`, which is the wrapped one."""
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_post_hook(_uses.stepped)

    def is_enabled(self) -> bool:
        """True: whether a script has a scaler shows only when it is used."""
        return True

    def get_scale(self) -> float:
        """The factor by which the present gradients are multiplied."""
        scaler = self._of_step()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _of_step(self) -> GradScaler | None:
        """What a backward pass has found holds until the end of its step."""
        optimizer, in_backward = self._watched, _in_backward()
        if optimizer is None:
            return None
        if _uses.stepping is None and not in_backward and self._found_at > _uses.at.get(optimizer, 0):
            return self._found() if self._found is not None else None
        found = _uses.of_step(optimizer)
        if in_backward:
            self._found, self._found_at = weakref.ref(found) if found is not None else None, next(_uses.ticks)
        return found

    @property
    def _watched(self) -> Optimizer | None:
        return self._optimizer() if self._optimizer is not None else None

    @property
    def _per_optimizer_states(self) -> Any:
        return getattr(self._scaler, "_per_optimizer_states", {})

    @property
    def _scaler(self) -> GradScaler | None:
        """That of the last step, whether or not it has scaled a loss since."""
        optimizer = self._watched
        return _uses.of_last_step(optimizer) if optimizer is not None else None


def _in_backward() -> bool:
    """Whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def _has_no_loss(optimizer: Optimizer) -> bool:
    """Whether no backward pass on this rank has reached an optimizer in the step under way."""
    session = getattr(optimizer, "_dgc", None)  # which may not be there yet
    if session is None or session.exchange.in_join:
        return session is not None
    return session.passes.none_yet and not session.carrier.exchanges_in_backward


def watch_scalers() -> None:
    """From now on notice every use of a GradScaler."""
    for name in _SEEN:
        method = getattr(GradScaler, name)
        if not hasattr(method, "__wrapped__"):
            setattr(GradScaler, name, _uses.noticed(method, name))


def stop_watching() -> None:
    """Put torch's own methods back."""
    for name in _SEEN:
        setattr(GradScaler, name, getattr(getattr(GradScaler, name), "__wrapped__", getattr(GradScaler, name)))


def already_unscaled(scaler: GradScaler | SeenScaler | None, optimizer: Optimizer) -> bool:
    """Whether a GradScaler has unscaled the gradients of `optimizer` in this step."""
    states = getattr(scaler, "_per_optimizer_states", {})
    stage = states[id(optimizer)].get("stage") if id(optimizer) in states else None
    return getattr(stage, "name", "") == "UNSCALED"


class StepScale:
    """The loss scale of the step under way, asked once: a GradScaler's lies on the device, behind the backward pass.

    Args:
        ask: function that gives the present one, > 0.
    """

    def __init__(self, ask: Callable[[], float]) -> None:
        self._ask = ask
        self._known: float | None = None

    def __call__(self) -> float:
        """That of this step."""
        if self._known is None:
            self._known = self._ask()
        return self._known

    def forget(self) -> None:
        """The step is over."""
        self._known = None


def scale_of(grad_scaler: GradScaler | SeenScaler | None) -> Callable[[], float]:
    """A function that gives the present factor of the gradients, 1 without a scaler."""
    if grad_scaler is None:
        return lambda: 1.0
    return lambda: float(grad_scaler.get_scale())
