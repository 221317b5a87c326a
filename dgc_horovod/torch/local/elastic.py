"""Local steps under Horovod Elastic: what a commit remembers of a round, and what a meeting leaves of it."""

from __future__ import annotations

from typing import Any

import torch

from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch.elastic import ResidualHandler
from dgc_horovod.torch.session.local import LocalSteps
from dgc_horovod.torch.session.session import Session, session_of


class RoundHandler(ResidualHandler):
    """The handler of an optimizer with local steps in a ``TorchState``.

    A commit exchanges nothing. Within a round it remembers this rank's own weights (the model's handler has them), its
    inner optimizer and the anchor, and to go back to it is to be in that round again. Where the ranks meet anew, all
    go on from the weights of rank 0, and begin a round with them: what the others have changed since their last
    exchange is lost, so that a commit right after an exchange is the one that loses nothing. `e` and the inner
    optimizer stay with each rank; a newcomer takes over the inner optimizer of rank 0.

    Args:
        optimizer: optimizer of ``DistributedOptimizer`` with local steps.

    Memory: of a commit, beside what every commit keeps: the anchor, 4 bytes a parameter, if it is made within a round.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        assert isinstance(self.session.strategy, LocalSteps)
        self._strategy = self.session.strategy
        self._round = self._strategy.rounds.copied()

    def save(self) -> None:
        """Remember `e`, the inner optimizer, outer momentum and the round under way: a commit."""
        super().save()
        self._round = self._strategy.rounds.copied()

    def restore(self) -> None:
        """Go back to the last commit; an exchange under way is given up, and does not touch the weights any more."""
        self._strategy.rounds.go_back(self._round)
        super().restore()

    def sync(self) -> None:
        """Take over outer momentum, options and step of rank 0, and begin a round; keep `e` and the inner optimizer."""
        session, rounds = self.session, self._strategy.rounds
        own = _inner(session) if rounds.count or session.exchange.steps else {}
        rounds.go_back()
        session.loaded = True  # so that the outer momentum is shared as well
        super().sync()
        for p, entries in own.items():
            session.optimizer.state[p].update(entries)

    def _place(self) -> Any:
        return super()._place(), self._strategy.rounds.count

    def _kept(self) -> ResidualState:
        self.session.carrier.follow(self.session)  # and within a round, too
        return self.session.kept.record(own=False)


def _inner(session: Session) -> dict[torch.Tensor, dict[str, Any]]:
    """A copy of the inner optimizer's state on this rank, by parameter."""
    states = session.optimizer.state
    return {
        p: {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in states[p].items()}
        for p in session.exchange.names
        if p in states
    }


def handler_of(optimizer: Any) -> ResidualHandler:
    """The handler in a ``TorchState`` of an optimizer that compresses."""
    session = session_of(optimizer)
    local = session is not None and isinstance(session.strategy, LocalSteps)
    return RoundHandler(optimizer) if local else ResidualHandler(optimizer)
