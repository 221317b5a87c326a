"""``join`` with local steps: a rank whose data have run out takes part in the others' exchanges."""

from __future__ import annotations

from typing import Any

from dgc_horovod.torch.gradients.exchange import GradientExchange


class RoundParticipant:
    """One optimizer with local steps of a rank in join.

    What the rank has changed since the last exchange goes into the next one, then changes of zero. The exchange in
    which all ranks are in join ends the round that each of them is in, so it stays, as ``exchange()`` does.

    Args:
        optimizer: optimizer of ``DistributedOptimizer`` with local steps, between two steps.

    Attributes:
        steps: number of inner steps before join, as if every round had been full.
    """

    has_own_state = True

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps = self.exchange.buckets.steps * optimizer._dgc_config.local_steps + optimizer._dgc_rounds.count
        self._mark(True)

    @property
    def exchange(self) -> GradientExchange:
        """The exchange of the optimizer."""
        found: GradientExchange = self.optimizer._dgc
        return found

    def _mark(self, in_join: bool) -> None:
        for engine in self.exchange.buckets.engines:
            engine.in_join = in_join

    def begin(self) -> None:
        """Start an exchange."""
        self.optimizer._dgc_rounds.send()

    def end(self) -> bool:
        """Finish it, all of which has arrived; returns whether it was the last one."""
        self.optimizer._dgc_end_exchange()
        return self.exchange.buckets.ranks_in_join == self.exchange.buckets.workers

    def leave(self) -> None:
        """Be no longer in join."""
        self._mark(False)
