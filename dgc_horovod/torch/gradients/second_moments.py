"""What the ranks of a torch optimizer tell each other of Adam's second moment, in one small allreduce a step."""

from __future__ import annotations

import torch

from dgc_horovod.core.adam import AdamStep
from dgc_horovod.core.second_moment import INTERVAL
from dgc_horovod.torch.gradients.collectives import Collectives, Pending


class SharedSums:
    """The sums of the step under way.

    Args:
        adam: what this rank tells, and is told.
        collectives: transport of all ranks.
    """

    def __init__(self, adam: AdamStep, collectives: Collectives) -> None:
        self._adam, self._collectives = adam, collectives
        self.pending: Pending | None = None

    def launch(self) -> None:
        """Every gradient has been given to its engine: begin to add up, unless that is done, or nothing is learnt."""
        message = self._adam.message() if self.pending is None else None
        if message is not None:
            name = f"second moments {self._adam.step % INTERVAL}"  # of one length each: Horovod knows them again
            self.pending = self._collectives.allreduce(torch.from_numpy(message), name)

    def take(self) -> None:
        """Wait for what is under way; before the step is closed."""
        if self.pending is not None:
            self._adam.receive(self._collectives.wait(self.pending).numpy())
            self.pending = None
