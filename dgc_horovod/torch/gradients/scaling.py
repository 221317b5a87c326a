"""The loss scale of a script that nobody has edited: its GradScalers are seen when they are used."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_Scaler: Any = torch.amp.GradScaler
_SEEN = ("scale", "unscale_", "step", "update")  # its methods that are wrapped, and put back by `stop_watching`
_last: weakref.ref[Any] | None = None  # the scaler that has scaled a loss last
_stepping: Any = None  # the scaler whose `step` is under way
_pass: tuple[int, Any] = -1, None  # the last backward pass that went through a scaled loss, and whose scaler's
_drivers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # optimizer -> its scaler, None: none
_ticks = itertools.count(1)
# When a scaler has scaled a loss last, if it was after its `update`, and when an optimizer's last step ended
_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


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
        self._optimizer: weakref.ref[Any] | None = None
        self._found: weakref.ref[Any] | None = None  # what a backward pass has found last
        self._found_at = 0

    def belongs_to(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on watch `optimizer`, which is the wrapped one."""
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_post_hook(_stepped)

    def is_enabled(self) -> bool:
        """True: whether a script has a scaler shows only when it is used."""
        return True

    def get_scale(self) -> float:
        """The factor by which the present gradients are multiplied."""
        scaler = self._of_step()
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _of_step(self) -> Any:
        """What a backward pass has found holds until the end of its step."""
        optimizer, in_backward = self._watched, _in_backward()
        if optimizer is None:
            return None
        if _stepping is None and not in_backward and self._found_at > _at.get(optimizer, 0):
            return self._found() if self._found is not None else None
        found = _of_step(optimizer)
        if in_backward:
            self._found, self._found_at = weakref.ref(found) if found is not None else None, next(_ticks)
        return found

    @property
    def _watched(self) -> Any:
        return self._optimizer() if self._optimizer is not None else None

    @property
    def _per_optimizer_states(self) -> Any:
        return getattr(self._scaler, "_per_optimizer_states", {})

    @property
    def _scaler(self) -> Any:
        """That of the last step, whether or not it has scaled a loss since."""
        optimizer = self._watched
        return _of_last_step(optimizer) if optimizer is not None else None


def _of_step(optimizer: Any) -> Any:
    """The scaler that has scaled the gradients of the step under way, or None."""
    if _stepping is not None:
        return _stepping
    if _in_backward() and _pass[0] == torch._C._current_graph_task_id():
        return _pass[1]()
    driver, newest = _driver_of(optimizer), _newest()
    if driver is not None and _has_scaled_for(optimizer, driver):
        return driver
    if newest is not None and _has_scaled_for(optimizer, newest):
        return None if _is_for_others(newest, optimizer) else newest
    return _of_last_step(optimizer) if _has_no_loss(optimizer) else None


def _of_last_step(optimizer: Any) -> Any:
    """The scaler of the last step; where that is gone, or before the first step, the one that scaled a loss last."""
    if optimizer in _drivers and _drivers[optimizer] is None:
        return None
    return _driver_of(optimizer) or _newest()


def _driver_of(optimizer: Any) -> Any:
    reference = _drivers.get(optimizer)
    return reference() if reference is not None else None


def _newest() -> Any:
    return _last() if _last is not None else None


def _has_scaled_for(optimizer: Any, scaler: Any) -> bool:
    return _at.get(scaler, 0) > _at.get(optimizer, 0)


def _is_for_others(scaler: Any, optimizer: Any) -> bool:
    """Whether the loss that `scaler` has scaled last, not the driver of `optimizer`, seems to be another optimizer's.

    One loss may be for two. Its backward pass is over when the first of them is stepped, even if the exchange of the
    other begins later.
    """
    others = [other for other in _drivers if other is not optimizer and _driver_of(other) is scaler]
    if optimizer in _drivers and _drivers[optimizer] is None:
        return bool(others)
    return _in_backward() and any(_at.get(other, 0) > _at[scaler] for other in others)


def _in_backward() -> bool:
    """Whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() != -1


def _has_no_loss(optimizer: Any) -> bool:
    """Whether no backward pass on this rank has reached an optimizer in the step under way."""
    session = getattr(optimizer, "_dgc", None)  # which may not be there yet
    if session is None or session.exchange.buckets.in_join:
        return session is not None
    return session.passes.none_yet and not session.carrier.exchanges_in_backward


def _stepped(optimizer: Any, *_: Any) -> None:
    if _stepping is not None:  # perhaps of an optimizer around this one
        _drivers[optimizer] = weakref.ref(_stepping)
    elif not already_unscaled(_driver_of(optimizer), optimizer):
        _drivers[optimizer] = None
    _at[optimizer] = next(_ticks)


def watch_scalers() -> None:
    """From now on notice every use of a GradScaler."""
    for name in _SEEN:
        method = getattr(_Scaler, name)
        if not hasattr(method, "__wrapped__"):
            setattr(_Scaler, name, _noticed(method, name))


def stop_watching() -> None:
    """Put torch's own methods back."""
    for name in _SEEN:
        setattr(_Scaler, name, getattr(getattr(_Scaler, name), "__wrapped__", getattr(_Scaler, name)))


def _noticed(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def noticed(self: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        global _last
        optimizer = args[0] if args else kwargs.get("optimizer")
        if isinstance(optimizer, torch.optim.Optimizer):
            _drivers[optimizer] = weakref.ref(self)
        elif name == "scale" and torch.is_grad_enabled():  # else for evaluation, which has no backward pass
            _last, _at[self] = weakref.ref(self), next(_ticks)
        elif name == "update":  # no gradient that is still to be stepped has the scale of before
            _at.pop(self, None)
        if name == "step":
            return _stepped_by(self, optimizer, lambda: method(self, *args, **kwargs))
        result = method(self, *args, **kwargs)
        if name == "scale" and not torch.compiler.is_compiling():
            _mark(result, self)
        return result

    return noticed


def _mark(losses: Any, scaler: Any) -> None:
    """Let the backward pass through any of `losses` be known for that of `scaler`."""
    reference = weakref.ref(scaler)

    def passes(_: torch.Tensor) -> None:
        global _pass
        _pass = torch._C._current_graph_task_id(), reference

    for loss in losses if isinstance(losses, (list, tuple)) else [losses]:
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.register_hook(passes)


def _stepped_by(scaler: Any, optimizer: Any, step: Callable[[], Any]) -> Any:
    """Call `step`, which `scaler` may skip; no hook of the optimizer runs then."""
    global _stepping
    before, _stepping = _stepping, scaler
    try:
        result = step()
    finally:
        _stepping = before
    if isinstance(optimizer, torch.optim.Optimizer):
        _at[optimizer] = next(_ticks)
    return result


def already_unscaled(scaler: Any, optimizer: Any) -> bool:
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


def scale_of(grad_scaler: Any) -> Callable[[], float]:
    """A function that gives the present factor of the gradients, 1 without a scaler."""
    if grad_scaler is None:
        return lambda: 1.0
    return lambda: float(grad_scaler.get_scale())
