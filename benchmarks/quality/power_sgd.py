"""PowerSGD (arXiv 1905.13727) as torch has it, on real ranks: a baseline at about the bytes of 1%."""

from __future__ import annotations

import socket
from typing import Any

import horovod.torch as hvd
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.quality.simulation import LossOf
from benchmarks.quality.tasks import Task
from benchmarks.quality.training import Run
from benchmarks.quality.variants import VARIANTS
from dgc_horovod.core.optimizer_exchange import OptimizerExchange


class PowerSgdRank:
    """Trains as a user's script with DistributedDataParallel does, on this rank; see `training.Ranks`.

    Horovod is off meanwhile.
    """

    exchange: OptimizerExchange | None = None

    def __init__(self, run: Run, task: Task, optimizer: torch.optim.Optimizer) -> None:
        variant = VARIANTS[run.variant]
        self.optimizer, self._clip_norm = optimizer, task.settings.clip_norm
        rank, size = hvd.rank(), hvd.size()
        port = hvd.broadcast_object(_free_port() if rank == 0 else 0, name="port")
        hvd.shutdown()
        distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
        # one bucket: with two, callbacks start collectives in an order that differs between ranks
        self._model: Any = DistributedDataParallel(task.model, bucket_cap_mb=1 << 20)
        self._state = powerSGD_hook.PowerSGDState(
            None, variant.power_sgd, start_powerSGD_iter=variant.dense_steps, random_seed=run.seed
        )
        self._model.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)
        task.model = self._model

    def step(self, loss_of: LossOf) -> float:
        """One step; the mean of all ranks' losses, so that all of them give up together."""
        self.optimizer.zero_grad()
        loss = loss_of(distributed.get_rank())
        loss.backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self.optimizer.step()
        mean = loss.detach().double()
        distributed.all_reduce(mean)
        return mean.item() / distributed.get_world_size()

    def traffic(self) -> float:
        """Elements handed to allreduces after the dense steps, in those of the gradients."""
        _, before, after = self._state.compression_stats()
        return float(after) / float(before)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
