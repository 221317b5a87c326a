"""Parameter groups, between whose parameters a script may freeze, move and add some from one step to the next."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping

import torch

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.optimizer_state import Group
from dgc_horovod.torch.updates import Update
from dgc_horovod.torch.wrapping.notices import ADDED_LATER

Parameter = torch.Tensor
FROZEN = 6  # steps after which what waits of a frozen parameter is dropped
_FADED = 1e-8  # so much of a momentum is nothing


class ParameterGroups:
    """The parameter groups of one optimizer.

    Args:
        optimizer: optimizer that has just been wrapped.
        names: name of every parameter of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Parameter, str]) -> None:
        groups = optimizer.param_groups
        self._names, self._optimizer = names, weakref.ref(optimizer)
        self._frozen = [p for group in groups for p in group["params"] if not p.requires_grad]
        self._count = sum(len(group["params"]) for group in groups)
        # the last known, for one that is in none any more
        self._of: dict[Parameter, Group] = {p: group for group in groups for p in group["params"]}
        self._frozen_for: dict[Parameter, int] = {}  # steps in a row
        self.changed = False  # whether a script may have moved a parameter

    def of(self, p: Parameter) -> Group:
        """The group of `p`."""
        if self.changed:
            self._of |= {p: group for group in self._now for p in group["params"]}
            self.changed = False
        return self._of[p]

    @property
    def _now(self) -> list[Group]:
        """The groups; the list itself may be another one since."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    def check_nothing_unfrozen(self, exchanged: Collection[Parameter]) -> None:
        """A parameter that was frozen at wrapping is in no bucket: were it trained now, replicas would diverge.

        Args:
            exchanged: parameters that have a place.

        Raises:
            UnsupportedUse: one is trained now, or was added since.
        """
        late, groups = self._frozen, self._now
        if sum(len(group["params"]) for group in groups) != self._count:
            late = [p for group in groups for p in group["params"] if p not in exchanged]
        for p in late:
            if p.requires_grad:
                if p not in self._names:
                    raise UnsupportedUse(ADDED_LATER.format(shape=tuple(p.shape)))
                raise UnsupportedUse(
                    f"{self._names[p]!r} did not require a gradient when the optimizer was wrapped and "
                    "does now; wrap the optimizer while it does, and freeze it afterwards"
                )

    def note_frozen(self, p: Parameter, update: Update, exchange: GradientExchange) -> None:
        """Whether `p` is frozen in this step; of one that stays so, what waits is dropped.

        It would go on moving for hundreds of steps. Its momentum still pushes it, as with stock Horovod, and of that,
        too, nothing waits longer than it lasts. Networks that take turns in one optimizer are not frozen for that long.
        """
        if p.requires_grad:
            if self._frozen_for:
                self._frozen_for.pop(p, None)
            return
        steps = self._frozen_for[p] = self._frozen_for.get(p, 0) + 1
        if steps >= FROZEN:
            factor = update.fading(self.of(p))
            if steps == FROZEN or factor**steps > _FADED:
                exchange.fade(self._names[p], 0.0 if steps == FROZEN else factor)

    def stays_frozen(self, p: Parameter) -> bool:
        """Whether nothing waits of `p` any more."""
        return self._frozen_for.get(p, 0) >= FROZEN
