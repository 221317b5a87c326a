"""One optimizer's choice of an exchange: what its ranks measure, compare, and say."""

from __future__ import annotations

import statistics
import time

import horovod.torch as hvd
import torch

from dgc_horovod.core.settling import Settling
from dgc_horovod.notices import tell_choice, tell_too_short
from dgc_horovod.planning.density import MOST
from dgc_horovod.planning.prediction import Observed, predicted
from dgc_horovod.planning.trial import DENSE, SETTLING, TIMED, Trial
from dgc_horovod.schedule import WarmupSchedule
from dgc_horovod.torch.gradients.collectives import Collectives
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.settling import measured

_SETTLED = 0.25  # see `WarmupSchedule.until_settled`
_WORTH = 10  # a run has so many times the steps that a choice takes, or none is made
_PROBED, _REPEATS = 2**20, 3  # elements, at most, of an allreduce that is timed, and how often


class Choice:
    """Times the steps of an optimizer, compares with the other ranks', and tells rank 0's user.

    Args:
        exchange: the compressed exchange of the optimizer.
        kind: name of its arithmetic: "sgd", "adam" or "other".
    """

    def __init__(self, exchange: GradientExchange, kind: str) -> None:
        self._exchange, self._collectives = exchange, exchange.collectives
        self._learns_second = kind == "adam" and exchange.config.freezes_second_moment
        self.begin()

    def begin(self) -> None:
        """Choose anew; where there is nothing to choose, stock Horovod stays."""
        config, self.trial = self._exchange.config, Trial()
        until = WarmupSchedule(steps=1, first_density=1.0, until_settled=_SETTLED)
        self._settling = Settling(until if self._learns_second else None, config.final_density)
        total = config.total_steps
        short = total is not None and (total < _WORTH * (SETTLING + TIMED) or config.density > MOST)
        if self._collectives.workers == 1 or not self._exchange.compressed or short:
            self.trial.stay()
        if total is not None and short and self._speaks:
            tell_too_short(total, config.density)

    @property
    def _speaks(self) -> bool:
        return self._collectives.rank == 0

    def count(self, half: bool) -> None:
        """Count a step of stock Horovod's exchange, in fp16 or not."""
        buckets = self._exchange.buckets
        width = 2 if half else 4
        buckets.counts.traffic.count_allreduce(width * sum(buckets.numel.values()), buckets.workers)
        buckets.counts.end_step()
        buckets.steps += 1

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """After a dense step: look whether Adam's second moment has settled, without which nothing is timed."""
        steps = self._exchange.buckets.steps
        if self.trial.ended or not self._settling.is_due(steps):
            return
        own = self._settling.judge(*measured(optimizer, self._exchange.compressed)) if self._speaks else [0.0] * 5
        told = self._sum(torch.tensor([1.0, *own], dtype=torch.float64), "settled").tolist()
        if round(told[0]) == self._collectives.workers:
            self._settling.take(told[1:], steps)
        else:  # Horovod's join has answered
            self.trial.stay()

    def step_ended(self, waited: float) -> bool:
        """Count the time of a step; the ranks compare where it is the last one that is timed.

        Args:
            waited: seconds of it in which stock Horovod's exchange was waited for, >= 0.

        Returns:
            Whether the next steps are exchanged in another way: the same on every rank.
        """
        trial, before = self.trial, self.trial.mode
        if self._learns_second and self._settling.settled_at is None:
            return False
        if not trial.step_ended(time.perf_counter(), waited):
            return False
        if self._exchange.buckets.ranks_in_join:
            trial.stay()  # those in join answer nothing but steps
            return False
        found = self._means([*trial.own(), *(self._link() if before == DENSE else ())])
        expected: dict[str, float] = {}
        if found is None:
            trial.stay()
        elif before == DENSE:
            observed = Observed(*found)
            expected = predicted(self._exchange.buckets, observed, hvd.gloo_enabled())
            trial.dense_timed(observed.step, expected)
        else:
            trial.tried(found[0])
        if self._speaks and found is not None:
            tell_choice(self._exchange.buckets, trial, expected)
        return trial.mode != before

    def _means(self, own: list[float]) -> list[float] | None:
        """Means over the ranks; None where some have no more data: Horovod's join answers with zeros for them."""
        sums = self._sum(torch.tensor([1.0, *own], dtype=torch.float64), "times").tolist()
        return [total / sums[0] for total in sums[1:]] if round(sums[0]) == self._collectives.workers else None

    def _sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        collectives: Collectives = self._collectives
        return collectives.wait(collectives.allreduce(tensor, f"auto.{name}"))

    def _link(self) -> tuple[float, float, float]:
        """Seconds of an allreduce of one element and of many, and how many."""
        numel = max(2, min(_PROBED, sum(self._exchange.buckets.numel.values()) // 8))
        return self._timed(1), self._timed(numel), float(numel)

    def _timed(self, numel: int) -> float:
        device = next(iter(self._exchange.names)).device
        self._sum(torch.zeros(numel, device=device), f"link.{numel}")  # all ranks are there, and Horovod knows the name
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            self._sum(torch.zeros(numel, device=device), f"link.{numel}")
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
