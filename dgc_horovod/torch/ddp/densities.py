"""Whether all ranks are at one density, asked before the first packet of a step."""

from __future__ import annotations

import threading

import torch

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import RankMismatch
from dgc_horovod.torch.gradients.collectives import Collectives


class SameDensity:
    """For a warm-up whose epoch comes from outside, so that it may be another one on each rank.

    Packets of other densities have other sizes. Gloo does not bear with those: the process that gets the longer one is
    ended, and no Python of it hears why. Once all ranks are at the final density nobody asks any more.

    Args:
        exchange: that of the optimizer.
        collectives: transport of all workers.

    Cost: 16 bytes to each worker and from it, waited for, in each step of the warm-up.
    """

    def __init__(self, exchange: OptimizerExchange, collectives: Collectives) -> None:
        self._exchange, self._collectives = exchange, collectives
        self._looked_at, self._all_are_through = -1, False
        self._lock = threading.Lock()  # backward of several devices calls hooks from several threads

    def check(self) -> None:
        """Compare, once a step.

        Raises:
            RankMismatch: on every rank, if the densities differ.
        """
        with self._lock:
            if self._exchange.steps == self._looked_at:
                return
            density = self._exchange.density()
            is_final = density == self._exchange.config.final_density
            if not (self._all_are_through and is_final):
                densities = self._told(density)
                if len(set(densities.values())) > 1:
                    raise RankMismatch(_different(self._exchange.steps, densities))
            self._looked_at, self._all_are_through = self._exchange.steps, is_final

    def _told(self, density: float) -> dict[tuple[int, int], float]:
        """Density by rank and epoch.

        An alltoall has one trip, where an allgather of Gloo goes round all ranks. Nor does it meet the allgather of a
        rank that asks no more: Gloo tells collectives of two kinds apart, and both wait.
        """
        workers, epoch = self._collectives.workers, self._exchange.epoch
        own = torch.tensor([density, -1 if epoch is None else epoch], dtype=torch.float64)
        self._collectives.traffic.count(own.nbytes, (workers - 1) * own.nbytes)
        told = self._collectives.wait(self._collectives.alltoall(own.repeat(workers), "density"))
        return {(rank, int(epoch)): density for rank, (density, epoch) in enumerate(told.view(-1, 2).tolist())}


def _different(step: int, densities: dict[tuple[int, int], float]) -> str:
    firsts: dict[float, str] = {}  # few, however many ranks there are
    for (rank, epoch), density in densities.items():
        firsts.setdefault(density, f"rank {rank} has {density:g} in epoch {epoch}")
    return (
        f"step {step}: the ranks are at different densities: is the epoch the same everywhere? "
        f"{', '.join(firsts.values())}. Call set_epoch with the same epoch on every rank, before its first step, and "
        "give every rank as many batches (unequal shards?)"
    )
