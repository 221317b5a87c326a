"""AdamW with a second moment that is the same on every rank and stays: a trial, before it is built.

Dense steps first, in which the optimizer is stock's; then ``first = b1*first + (1-b1)*g;  v += first / (sqrt(second) +
eps)`` with each rank's own first moment and the second moment of the dense steps (1-bit Adam, arXiv 2102.02888).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dgc_horovod.kernels.contract import Accumulation, ErrorFeedback
from dgc_horovod.torch.updates.rules import AdamUpdate, Group, Parameter

Moments = tuple[torch.Tensor, torch.Tensor]


class FrozenAdamUpdate(AdamUpdate):
    """The split of AdamW's arithmetic on one simulated rank.

    Args:
        dense_steps: W >= 1.
        found: moments that the first rank has found at the end of the dense steps, which all share.
    """

    def __init__(self, dense_steps: int, found: dict[Parameter, tuple[Moments, int]]) -> None:
        super().__init__(decoupled=True)
        self._left, self._found = dense_steps, found

    @property
    def is_dense(self) -> bool:
        """Whether the step under way is."""
        return self._left > 0

    def accumulation(self, p: Parameter, group: Group) -> Accumulation:
        return ErrorFeedback() if self.is_dense else self._correction(p, group, frozen=True)

    def moments(self, p: Parameter, group: Group, states: Any) -> Moments | None:
        """What the engine is to begin with; None but in the first step that is not dense."""
        if self.is_dense or self.directions(p):
            return None
        adopted = self.adopt_state(p, group, states)
        if adopted is not None:
            first, second = adopted
            self._found[p] = (first, second / (1 - group["betas"][1] ** self.directions(p))), self.directions(p)
        moments, steps = self._found[p]
        self.set_directions(p, steps)
        return moments

    def step(self, optimizer: torch.optim.Optimizer, compressed: list[Parameter], own_step: Callable[[], Any]) -> None:
        own_step() if self.is_dense else super().step(optimizer, compressed, own_step)

    def end_step(self) -> None:
        """The step has been applied."""
        self._left = max(0, self._left - 1)
