"""The loss scale of a script that nobody has edited: its GradScalers are seen when they are used."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_Scaler: Any = torch.amp.GradScaler
_SEEN = ("scale", "unscale_", "step")  # its methods that are wrapped, and put back by `stop_watching`
_last: weakref.ref[Any] | None = None  # the scaler that has scaled a loss last
_drivers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # optimizer -> its scaler, None: none
_ticks = itertools.count(1)
# When a scaler has scaled a loss, and an optimizer stepped, last
_at: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class SeenScaler:
    """Stands for the GradScaler that drives an optimizer, whichever it is.

    It is known once that scaler has unscaled or stepped the optimizer, or once the optimizer has stepped without one.
    Before that, during the first step, it is taken to be the one that has scaled a loss last. So it is where a script
    makes a new one: each epoch, or after steps without.
    """

    def __init__(self) -> None:
        self._optimizer: weakref.ref[Any] | None = None

    def belongs_to(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on watch `optimizer`, which is the wrapped one."""
        self._optimizer = weakref.ref(optimizer)
        optimizer.register_step_post_hook(_stepped)

    def is_enabled(self) -> bool:
        """True: whether a script has a scaler shows only when it is used."""
        return True

    def get_scale(self) -> float:
        """The factor by which the present gradients are multiplied."""
        scaler = self._scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    @property
    def _per_optimizer_states(self) -> Any:
        return getattr(self._scaler, "_per_optimizer_states", {})

    @property
    def _scaler(self) -> Any:
        optimizer = self._optimizer() if self._optimizer is not None else None
        newest = _last() if _last is not None else None
        if optimizer not in _drivers:
            return newest
        reference = _drivers[optimizer]
        driver = reference() if reference is not None else None
        if newest is None or newest is driver or not _has_scaled_since_a_step_of(optimizer, newest):
            return driver
        if driver is not None and _has_scaled_since_a_step_of(optimizer, driver):
            return driver
        had_none_or_has_one = reference is None or driver is not None
        return driver if had_none_or_has_one and _drives_others(newest, optimizer) else newest


def _has_scaled_since_a_step_of(optimizer: Any, scaler: Any) -> bool:
    return _at.get(scaler, 0) > _at.get(optimizer, 0)


def _drives_others(scaler: Any, optimizer: Any) -> bool:
    others = (reference for other, reference in _drivers.items() if other is not optimizer)
    return any(reference is not None and reference() is scaler for reference in others)


def _stepped(optimizer: Any, *_: Any) -> None:
    _drivers.setdefault(optimizer, None)
    _at[optimizer] = next(_ticks)


def watch_scalers() -> None:
    """From now on notice every use of a GradScaler."""
    for name in _SEEN:
        method = getattr(_Scaler, name)
        if not hasattr(method, "__wrapped__"):
            setattr(_Scaler, name, _noticed(method))


def stop_watching() -> None:
    """Put torch's own methods back."""
    for name in _SEEN:
        setattr(_Scaler, name, getattr(getattr(_Scaler, name), "__wrapped__", getattr(_Scaler, name)))


def _noticed(method: Any) -> Any:
    @functools.wraps(method)
    def noticed(self: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
        global _last
        if isinstance(what, torch.optim.Optimizer):
            _drivers[what] = weakref.ref(self)
        else:
            _last, _at[self] = weakref.ref(self), next(_ticks)
        return method(self, what, *args, **kwargs)

    return noticed


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
