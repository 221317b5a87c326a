"""The loss scale of a script that nobody has edited: the GradScaler is seen when it scales a loss."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

_Scaler: Any = torch.amp.GradScaler  # its method is put back by `stop_watching`


class SeenScaler:
    """Stands for the script's GradScaler, whichever it is: the last one that has scaled a loss; else a scale of 1."""

    _last: weakref.ref[Any] | None = None

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
        return SeenScaler._last() if SeenScaler._last is not None else None


def watch_scalers() -> None:
    """From now on notice every GradScaler that scales a loss."""
    if not hasattr(_Scaler.scale, "__wrapped__"):
        _Scaler.scale = _noticed(_Scaler.scale)


def stop_watching() -> None:
    """Put torch's own method back."""
    _Scaler.scale = getattr(_Scaler.scale, "__wrapped__", _Scaler.scale)
    SeenScaler._last = None


def _noticed(scale: Any) -> Any:
    @functools.wraps(scale)
    def noticed(self: Any, outputs: Any) -> Any:
        SeenScaler._last = weakref.ref(self)
        return scale(self, outputs)

    return noticed
