"""One rank of `benchmarks.internet`: runs one after the other, as a user's script does them; rank 0 writes a file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from benchmarks import connections
from benchmarks.quality.simulation import LossOf
from benchmarks.quality.tasks import Task
from benchmarks.quality.training import Run, train
from benchmarks.quality.worker import RealRank

NO_OP = "no exchange"


class TimedRank(RealRank):
    """The same on the clock. Nothing else is exchanged: behind a slow link it would be most of a step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seconds: list[float] = []

    def step(self, loss_of: LossOf) -> float:
        """One step; this rank's loss."""
        start = time.perf_counter()
        loss = self.own_step(loss_of)
        self.seconds.append(time.perf_counter() - start)
        return loss.item()


def timed(run: Run, steps: int, exchanges: bool) -> dict[str, Any]:
    """The first steps of a run: ``milliseconds`` of each, and ``sent``, bytes a step."""
    made: list[TimedRank] = []

    def make(run: Run, task: Task, optimizer: torch.optim.Optimizer) -> TimedRank:
        made.append(TimedRank(run, task, optimizer, exchanges))
        return made[-1]

    train(run, make, steps, points=0)
    ranks = made[0]
    stats = ranks.optimizer.compression_stats() if ranks.exchange else {}
    full = 4 * sum(p.numel() for group in ranks.optimizer.param_groups for p in group["params"])
    sent = stats["bytes_sent"] / steps if stats else full * exchanges
    return {"milliseconds": [round(1e3 * seconds, 2) for seconds in ranks.seconds], "sent": round(sent)}


def main() -> None:
    """Do the runs of the command line."""
    file, *words = sys.argv[1:]
    torch.set_num_threads(1)
    hvd.init()
    found = []
    for word in words:
        order = json.loads(word)
        found.append(timed(Run(**order["run"]), order["steps"], order["exchanges"]))
        connections.shut_down()
        hvd.init()
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(found, allow_nan=False))
    hvd.shutdown()


if __name__ == "__main__":
    main()
