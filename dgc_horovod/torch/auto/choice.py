"""What the ranks of a torch optimizer compare, now and then, to choose its exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from dgc_horovod.choice import REPEATS, Choice
from dgc_horovod.torch.gradients.exchange import GradientExchange


class OptimizerChoice(Choice):
    """`Choice` of one optimizer, after its steps.

    Args:
        exchange: the compressed exchange of the optimizer.
        stock: whose the uncompressed exchange is, in words.
        on_gloo: whether it is Gloo's, on a CPU.
    """

    def __init__(self, exchange: GradientExchange, stock: str, on_gloo: bool) -> None:
        self._exchange, self._collectives = exchange, exchange.collectives
        super().__init__(exchange.buckets, stock, on_gloo)

    def compare_after(self, waited: float) -> bool:
        """Count the time of a step; the ranks compare where it is the last one that is timed.

        Args:
            waited: seconds of it in which the uncompressed exchange was waited for, >= 0.

        Returns:
            Whether the next steps are exchanged in another way: the same on every rank.
        """
        before = self.trial.mode
        if not self.step_ended(time.perf_counter(), waited):
            return False
        if self.compare(self._sum(self.own(), "times")):
            self.expect(self._sum(self._observed(), "expected"))
        return self.trial.mode != before

    def _observed(self) -> list[float]:
        sparse = any(p.grad is not None and p.grad.is_sparse for p in self._exchange.names)
        return self.observed(self._timed(1), self._timed(self.probed), sparse)

    def _sum(self, own: Sequence[float], name: str) -> list[float]:
        return self._allreduced(torch.tensor(own, dtype=torch.float64), name).tolist()

    def _allreduced(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return self._collectives.wait(self._collectives.allreduce(tensor, f"auto.{name}"))

    def _timed(self, numel: int) -> float:
        device = next(iter(self._exchange.names)).device
        # the first time all ranks get there, and Horovod learns the name
        self._allreduced(torch.zeros(numel, device=device), f"link.{numel}")
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            self._allreduced(torch.zeros(numel, device=device), f"link.{numel}")
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
