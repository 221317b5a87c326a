"""The twin of `elastic_job` with local steps: ``python -m tests.helpers.local_elastic_job FOLDER HOW``.

HOW may also be "killed, within a round": commits are then not at exchanges. The worker dies in the middle of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer
from tests.helpers import elastic_job
from tests.helpers.elastic_job import BATCHES
from tests.helpers.training import weights

__all__ = ["BATCHES", "KILLED_AT"]
H, KILLED_AT, WITHIN_A_ROUND = 5, 89, 7  # the exchange after batch 89 is one of a full round


class Job(elastic_job.Job):
    """One worker's part."""

    def __init__(self, folder: Path, how: str) -> None:
        super().__init__(folder, how)
        rounds = session(self.optimizer).strategy.rounds
        self.receive, rounds.receive = rounds.receive, self.received

    def wrapped(self) -> Any:
        adamw = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        compression = Compression.local(H, density=0.05, min_numel=16, check_every=1)
        return DistributedOptimizer(adamw, self.model.named_parameters(), compression)

    def train(self, state: Any) -> None:
        super().train(state)
        self.optimizer.exchange()  # batches may end within a round

    def before_step(self, batch: int) -> None:
        """It dies later."""

    def received(self) -> bool:
        """The changes are on their way."""
        if session(self.optimizer).exchange.steps == KILLED_AT // H:
            self.may_die()
        return bool(self.receive())

    def commit_every(self) -> int:
        return WITHIN_A_ROUND if "within a round" in self.how else super().commit_every()

    def seen(self) -> dict[str, Any]:
        every = hvd.allgather(weights(self.model)[None], name="spread")
        inner = self.optimizer.state[next(self.model.parameters())]
        counts = session(self.optimizer).exchange.counts
        return {
            "spread": float((every - every[:1]).abs().max()), "in the round": counts.pending,
            "inner steps": hvd.allgather_object(int(inner["step"]) if "step" in inner else 0),
        }  # fmt: skip


if __name__ == "__main__":
    elastic_job.main(Job)
