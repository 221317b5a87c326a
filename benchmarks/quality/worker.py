"""One rank of a run on real ranks: as a user's script trains, with Horovod or by torch's PowerSGD."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import connections
from benchmarks.quality.simulation import LossOf
from benchmarks.quality.tasks import Task
from benchmarks.quality.training import Run, train
from benchmarks.quality.variants import AFTERWARDS, VARIANTS
from benchmarks.timing import wall_clock
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


class TimedRank(RealRank):
    """The same on the clock. Nothing else is exchanged: behind a slow link it would be most of a step."""

    def __init__(self, *given: Any, exchanges: bool) -> None:
        super().__init__(*given, exchanges)
        self.milliseconds: list[float] = []

    def step(self, loss_of: LossOf) -> float:
        """One step; this rank's loss."""
        losses = list[Tensor]()
        self.milliseconds.append(round(wall_clock(lambda: losses.append(self.own_step(loss_of))), 2))
        return losses[0].item()


class PowerSgdRank:
    """PowerSGD (arXiv 1905.13727) as torch has it, a baseline at about the bytes of 1%; see `training.Ranks`.

    Trains as a user's script with DistributedDataParallel does, on this rank; Horovod is off meanwhile.
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


def rank(order: Mapping[str, Any]) -> dict[str, Any]:
    """Do a run, given by its fields."""
    run, made = Run(**order), []
    hvd.init()

    def make(*given: Any) -> RealRank | PowerSgdRank:
        made.append((PowerSgdRank if VARIANTS[run.variant].power_sgd else RealRank)(*given))
        return made[-1]

    found = train(run, make)
    if isinstance(made[0], PowerSgdRank):
        found["traffic"] = round(made[0].traffic(), 6)
        distributed.destroy_process_group()
    else:
        hvd.shutdown()
    return found


def timed_rank(orders: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Runs one after the other, as a user's script does them: ``milliseconds`` of each step, bytes ``sent`` a step."""
    found = []
    connections.start()
    for order in orders:
        made = list[TimedRank]()

        def make(*given: Any, order: Mapping[str, Any] = order, made: list[TimedRank] = made) -> TimedRank:
            made.append(TimedRank(*given, exchanges=order["exchanges"]))
            return made[-1]

        train(Run(**order["run"]), make, order["steps"], points=0)
        (rank,) = made
        stats = rank.optimizer.compression_stats() if rank.exchange else {}
        full = 4 * sum(p.numel() for group in rank.optimizer.param_groups for p in group["params"])
        sent = stats["bytes_sent"] / order["steps"] if stats else full * order["exchanges"]
        found.append({"milliseconds": rank.milliseconds, "sent": round(sent)})
        connections.renew()
    hvd.shutdown()
    return found
