"""One rank of a run on real ranks: ``python -m benchmarks.quality.worker RUN FILE``, below horovodrun."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, distributed, nn

from benchmarks.quality.power_sgd import PowerSgdRank
from benchmarks.quality.simulation import LossOf
from benchmarks.quality.tasks import Task
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import AFTERWARDS, VARIANTS
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.testing.torch import session
from dgc_horovod.torch import Compression, DistributedOptimizer


class RealRank:
    """Trains as a user's script does, on this rank; see `training.Ranks`.

    Args:
        run: what is trained.
        task: its model and data.
        optimizer: on its parameters, not wrapped.
        exchanges: whether anything is exchanged; otherwise each rank trains for itself.
    """

    def __init__(self, run: Run, task: Task, optimizer: torch.optim.Optimizer, exchanges: bool = True) -> None:
        variant = VARIANTS[run.variant]
        assert variant.masks_below == 1, f"{run.variant} is a trial that only the simulation has"
        config = variant.config(task.settings)
        local = config is not None and config.local_steps is not None
        self._model, self._forgets, self._exchanges = task.model, variant.forgets, exchanges
        clip_norm = task.settings.clip_norm if variant.clips == AFTERWARDS else None
        no_effect = config is not None and not local
        assert not (no_effect and clip_norm), f"{run.variant}: a script's clipping would become a local one"
        # a rank's own gradient, which local steps clip, is noisier than the average
        self._clip_norm = clip_norm * math.sqrt(hvd.size()) if clip_norm and local else clip_norm
        self.optimizer: Any = optimizer
        if exchanges:
            self.optimizer = DistributedOptimizer(
                optimizer, task.model.named_parameters(), compression=config or Compression.none
            )
        self.exchange: OptimizerExchange | None = session(self.optimizer).exchange if exchanges and config else None

    def step(self, loss_of: LossOf) -> float:
        """One step; the mean of all ranks' losses, so that all of them give up together."""
        return hvd.allreduce(self.own_step(loss_of).double(), name="loss").item()

    def own_step(self, loss_of: LossOf) -> Tensor:
        """One step; this rank's loss."""
        self.optimizer.zero_grad()
        loss = loss_of(hvd.rank())
        loss.backward()
        if self._exchanges:
            self.optimizer.synchronize()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        with self.optimizer.skip_synchronize() if self._exchanges else nullcontext():
            self.optimizer.step()
        if self._forgets and self.exchange:
            self.exchange.clear()
        return loss.detach()


def main() -> None:
    """Do the run of the command line; rank 0 writes what it found."""
    run, file = Run(**json.loads(sys.argv[1])), Path(sys.argv[2])
    hvd.init()
    rank, made = hvd.rank(), []

    def make(*given: Any) -> RealRank | PowerSgdRank:
        made.append((PowerSgdRank if VARIANTS[run.variant].power_sgd else RealRank)(*given))
        return made[-1]

    found = train(run, make)
    if isinstance(made[0], PowerSgdRank):
        found["traffic"] = round(made[0].traffic(), 6)
        distributed.destroy_process_group()
    else:
        hvd.shutdown()
    if rank == 0:
        file.write_text(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
