"""Notices what a script does to ``p.grad`` between backward, synchronize and step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_Seen = tuple[torch.Tensor, int]
_Applied = tuple[torch.Tensor, weakref.ref[torch.Tensor] | None, int]  # parameter, its gradient, version of that
_SAMPLE, _SMALL = 4, 4096  # so many tensors, of at most so many elements, are compared by their content


def _version(p: torch.Tensor) -> int:
    """How often ``p.grad`` has been written to in place; 0 where there is none."""
    grad = p.grad
    return grad._version if grad is not None else 0


def _applied(p: torch.Tensor) -> _Applied:
    """Which tensor ``p.grad`` is, without keeping it alive: a script may give p another one of the same version."""
    grad = p.grad
    return (p, weakref.ref(grad), grad._version) if grad is not None else (p, None, 0)


class GradientWatch:
    """Remembers the state in which each ``p.grad`` was last seen."""

    def __init__(self) -> None:
        self._taken: dict[int, _Seen] = {}  # by id: a tensor's own hash is a call of Python's for each
        self._synchronized: list[_Applied] = []
        self.brought = False  # whether a backward pass has, what the last synchronize has exchanged
        self._applied: list[_Applied] = []
        self._weights: list[_Seen] = []  # some, with the version of themselves
        self._copies: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # of small updates: what goes by way of ``.data`` counts no version

    def taken(self, p: torch.Tensor) -> None:
        """A gradient has been handed to the exchange: a new step has begun."""
        self._taken[id(p)] = p, _version(p)
        if self._synchronized:
            self._synchronized, self._copies = [], []

    def synchronized(self, parameters: Iterable[torch.Tensor], brought: bool) -> None:
        """Every ``p.grad`` now holds its update. `brought`: whether a backward pass has brought its gradient."""
        self._taken, self.brought = {}, brought
        self._synchronized = list(map(_applied, parameters))
        self._weights = [(p, p._version) for p, _, _ in self._synchronized[:_SAMPLE] if p.requires_grad]
        self._copy()

    def _copy(self) -> None:
        there = [p for p, _, _ in self._synchronized if p.grad is not None and not p.grad.is_sparse]
        small = [p for p in there if 0 < p.numel() <= _SMALL and p.device.type == "cpu"]
        self._copies = [(p, p.grad.clone()) for p in small[:_SAMPLE] if p.grad is not None]

    def applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """The optimizer has applied the updates."""
        self._synchronized, self._copies = [], []
        self._applied = list(map(_applied, parameters))

    def look_again(self) -> None:
        """What has changed up to now was meant to, and is known of."""
        self._taken = {key: (p, _version(p)) for key, (p, _) in self._taken.items()}
        self._synchronized = [_applied(p) for p, _, _ in self._synchronized]
        self._copy()

    def changed_since_taken(self) -> bool:
        """Whether a gradient was changed after the exchange had taken it: the change has no effect."""
        return any(_version(p) != seen for p, seen in self._taken.values())

    def changed_since_synchronized(self, loss_scale: float = 1.0) -> bool:
        """Whether an update was changed since synchronize; one that is gone was not.

        Args:
            loss_scale: loss scale, > 0; a GradScaler's unscale_, which divides by it, does not count as a change.
        """
        if any(_version(p) != seen for p, _, seen in self._synchronized if p.grad is not None):
            return True
        return any(p.grad is not None and not _is_same(p.grad, copy, loss_scale) for p, copy in self._copies)

    def writes_to(self, p: torch.Tensor) -> int | None:
        """How often the update of `p` was written to since synchronize; None where ``p.grad`` is another tensor."""
        _, ref, seen = next((each for each in self._synchronized if each[0] is p), (p, None, 0))
        return _version(p) - seen if ref is not None and p.grad is ref() else None

    def weights_changed(self) -> bool:
        """Whether weights were written to in place since synchronize: an update that nobody has told of was applied."""
        return bool(self._weights) and all(p._version != seen for p, seen in self._weights)

    def has_applied(self, grad: torch.Tensor | None) -> bool:
        """Whether `grad` is the tensor that an update of the last step stood in."""
        return grad is not None and any(ref is not None and ref() is grad for _, ref, _ in self._applied)

    def unchanged_since_applied(self) -> bool:
        """Whether every ``p.grad`` is still the update that has been applied."""
        return bool(self._applied) and all(
            ref is not None and p.grad is ref() is not None and _version(p) == seen for p, ref, seen in self._applied
        )


def _is_same(grad: torch.Tensor, copy: torch.Tensor, loss_scale: float) -> bool:
    return torch.equal(grad, copy) or (loss_scale != 1 and torch.allclose(grad, copy / loss_scale, 1e-3, 0.0))
