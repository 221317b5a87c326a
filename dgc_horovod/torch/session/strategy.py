"""When a session exchanges, and what: at every step, every so many, or in the way that the clock has chosen."""

from __future__ import annotations

from typing import Any

import torch

from dgc_horovod.session import base
from dgc_horovod.torch.clipping.local import Clip
from dgc_horovod.torch.session.passes import Result
from dgc_horovod.torch.session.session import Session

Parameter = torch.Tensor


class Strategy(base.Strategy[Session, torch.Tensor]):
    """What a step of one session is.

    Args:
        session: session that has it.
    """

    takes_gradients = True  # whether gradients are exchanged
    scales_itself = False  # whether ``step`` is called for a step that a GradScaler skips, and unscales
    stock = False  # whether the framework's own exchange carries the gradients of the present step

    def built(self) -> None:
        """The session has a new exchange, between the ranks that there are."""

    def started(self) -> None:
        """The session is complete."""

    def hand_over(self, p: Parameter) -> Result:
        """Hand the gradient of `p`, which is complete, to its exchange."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for every exchange of this step; afterwards ``p.grad`` is the same on every rank."""
        raise NotImplementedError

    def step(self) -> bool:
        """One step of the script, whose gradients are there; returns whether the optimizer has made it."""
        raise NotImplementedError

    def clear_gradients(self) -> None:
        """The script is about to clear its gradients."""
        raise NotImplementedError

    def end_for_another(self) -> None:
        """Another optimizer has the parameters from now on: leave them the same on every rank, as they are here."""

    # -- state

    def ranks_changed(self) -> None:
        """A checkpoint of another number of ranks is loaded, on every rank."""

    def share_loaded(self, root: int) -> None:
        """Let all ranks have what rank `root` of them has loaded of `outer`."""

    def extend(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's own state with what this adds to it."""
        return state_dict

    def split(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What `extend` was given, and what it has added.

        Raises:
            UnsupportedUse: that is of other parameters.
        """
        return state_dict, {}

    def load(self, added: dict[str, torch.Tensor]) -> None:
        """Go on from what `split` has found, once the optimizer has loaded the rest."""

    # -- clipping

    def sees_clip(self, clip: Clip, known: bool) -> None:
        """The script has clipped gradients of this session.

        Args:
            clip: what it has asked for.
            known: whether it is one that compression can follow.
        """
