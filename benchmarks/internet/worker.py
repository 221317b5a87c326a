"""One rank of `benchmarks.internet`: runs one after the other, as a user's script does them; rank 0 writes a file."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from benchmarks import connections
from benchmarks.quality.simulation import LossOf
from benchmarks.quality.tasks import Task
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import VARIANTS
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.torch import Compression, DistributedOptimizer

NO_OP = "no exchange"


class ScriptRank:
    """A script's loop on this rank, on the clock; see `training.Ranks`.

    Args:
        run: what is trained; without exchange each rank is for itself.
        task: its model and data.
        optimizer: on its parameters, not wrapped.
        exchanges: whether anything is exchanged.
    """

    def __init__(self, run: Run, task: Task, optimizer: torch.optim.Optimizer, exchanges: bool) -> None:
        config = VARIANTS[run.variant].config(task.settings)
        self._parameters = list(task.model.parameters())
        # what is noisier by sqrt(N) than the average, where each rank clips its own
        own = config is not None and config.local_steps is not None
        self._limit = (task.settings.clip_norm or math.inf) * (math.sqrt(hvd.size()) if own else 1)
        self.optimizer: Any = optimizer
        self.exchange: OptimizerExchange | None = None
        self._wrapped = exchanges
        if exchanges:
            self.optimizer = DistributedOptimizer(
                optimizer, task.model.named_parameters(), compression=config or Compression.none
            )
        if exchanges and config is not None:
            self.exchange = self.optimizer._dgc.buckets
        self.seconds: list[float] = []

    def step(self, loss_of: LossOf) -> float:
        """One step; this rank's loss."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(hvd.rank())
        loss.backward()
        if self._wrapped:
            self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self._parameters, self._limit)
        if self._wrapped:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        return loss.item()


def timed(run: Run, steps: int, exchanges: bool) -> dict[str, Any]:
    """The first steps of a run: what `train` finds, and ``milliseconds`` of each step and ``sent``, bytes a step."""
    made: list[ScriptRank] = []

    def make(run: Run, task: Task, optimizer: torch.optim.Optimizer) -> ScriptRank:
        made.append(ScriptRank(run, task, optimizer, exchanges))
        return made[-1]

    found = train(run, make, steps)
    ranks = made[0]
    full = 4 * sum(p.numel() for p in ranks._parameters) if exchanges else 0
    stats = ranks.optimizer.compression_stats() if ranks.exchange else {}
    sent = stats["bytes_sent"] / steps if stats else full
    times = [round(1e3 * seconds, 2) for seconds in ranks.seconds]
    return {**found, "milliseconds": times, "sent": round(sent)}


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
