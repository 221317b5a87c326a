"""``join`` with local steps: a rank whose data have run out takes part in the others' exchanges."""

from __future__ import annotations

from dgc_horovod.torch.session.local import LocalSteps
from dgc_horovod.torch.session.session import Session


class RoundParticipant:
    """One session with local steps of a rank in join.

    What the rank has changed since the last exchange goes into the next one, then changes of zero. The exchange in
    which all ranks are in join ends the round that each of them is in, so it stays, as ``exchange()`` does.

    Args:
        strategy: local steps of the session, between two of them.

    Attributes:
        steps: number of inner steps before join, as if every round had been full.
    """

    has_own_state = True

    def __init__(self, strategy: LocalSteps) -> None:
        self._strategy, self.session = strategy, strategy.session
        per_round = self.session.config.local_steps
        assert per_round is not None
        self.steps = self.session.exchange.steps * per_round + strategy.rounds.count
        mark(self.session, True)

    def begin(self) -> None:
        """Start an exchange."""
        self._strategy.rounds.send()

    def end(self) -> bool:
        """Finish it, all of which has arrived; returns whether it was the last one."""
        self._strategy.end_exchange()
        exchange = self.session.exchange
        return exchange.ranks_in_join == exchange.workers

    def leave(self) -> None:
        """Be no longer in join."""
        mark(self.session, False)


def mark(session: Session, in_join: bool) -> None:
    """Let messages of this rank say whether it is in join."""
    for engine in session.exchange.engines:
        engine.in_join = in_join
