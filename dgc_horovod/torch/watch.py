"""Notices what a script does to ``p.grad`` between backward, synchronize and step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_Seen = tuple[torch.Tensor, int]


def _version(p: torch.Tensor) -> int:
    """How often ``p.grad`` has been written to in place; 0 where there is none."""
    grad = p.grad
    return grad._version if grad is not None else 0


class GradientWatch:
    """Remembers the state in which each ``p.grad`` was last seen."""

    def __init__(self) -> None:
        self._taken: dict[torch.Tensor, int] = {}
        self._synchronized: list[_Seen] = []
        self._applied: list[_Seen] = []

    def taken(self, p: torch.Tensor) -> None:
        """A gradient has been handed to the exchange: a new step has begun."""
        self._taken[p] = _version(p)
        self._synchronized = []

    def synchronized(self, parameters: Iterable[torch.Tensor]) -> None:
        """Every ``p.grad`` now holds its update."""
        self._taken = {}
        self._synchronized = [(p, _version(p)) for p in parameters]

    def applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """The optimizer has applied the updates."""
        self._synchronized = []
        self._applied = [(p, _version(p)) for p in parameters]

    def changed_since_taken(self) -> bool:
        """Whether a gradient was changed after the exchange had taken it: the change has no effect."""
        return any(_version(p) != seen for p, seen in self._taken.items())

    def changed_since_synchronized(self) -> bool:
        """Whether an update was changed since synchronize; a GradScaler's unscale_ does not count as a change."""
        return any(_version(p) != seen for p, seen in self._synchronized)

    def unchanged_since_applied(self) -> bool:
        """Whether every ``p.grad`` is still the update that has been applied."""
        return bool(self._applied) and all(p.grad is not None and _version(p) == seen for p, seen in self._applied)
