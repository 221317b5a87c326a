"""One optimizer's choice of an exchange: what its ranks measure, compare, and say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from dgc_horovod.core.settling import Settling
from dgc_horovod.notices import (
    JOINED,
    OVERFLOW,
    SPARSE,
    UNLEARNT,
    tell_choice,
    tell_given_up,
    tell_too_short,
    tell_waits,
)
from dgc_horovod.planning.density import MOST
from dgc_horovod.planning.prediction import Observed, predicted
from dgc_horovod.planning.trial import COMPRESSED, DENSE, HALF, SETTLING, TIMED, Trial
from dgc_horovod.schedule import WarmupSchedule
from dgc_horovod.torch.auto.half import fits
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
        optimizer: optimizer, of which nothing is kept.
        kind: name of its arithmetic: "sgd", "adam" or "other".
        stock: whose the uncompressed exchange is, in words.
        on_gloo: whether it is Gloo's, on a CPU.

    Attributes:
        given_up: whether the uncompressed exchange is to stay, whatever the clock says: the same on every rank once all
            have ended a step, or are in join.
        script_clips: whether the script has clipped gradients of this rank by itself.
        script_accumulates: whether it has made a step of several exchanged gradients, or of none.
    """

    def __init__(
        self, exchange: GradientExchange, optimizer: torch.optim.Optimizer, kind: str, stock: str, on_gloo: bool
    ) -> None:
        self._stock, self._on_gloo = stock, on_gloo
        self._exchange, self._collectives = exchange, exchange.collectives
        self._learns_second = kind == "adam" and exchange.config.freezes_second_moment
        windows = [1 / (1 - group["betas"][1]) for group in optimizer.param_groups] if self._learns_second else [0.0]
        self._settles_at = round(2 * max(windows))  # the first step at which it may have, see `Settling`
        self.given_up = self.script_clips = self.script_accumulates = False
        self.begin()

    def begin(self) -> None:
        """Choose anew; where there is nothing to choose, the uncompressed exchange stays."""
        config, self.trial = self._exchange.config, Trial()
        until = WarmupSchedule(steps=1, first_density=1.0, until_settled=_SETTLED)
        self._settling = Settling(until if self._learns_second else None, config.final_density)
        total, least = config.total_steps, max(_WORTH * (SETTLING + TIMED), 2 * self._settles_at)
        short = total is not None and (total < least or config.density > MOST)
        if self._collectives.workers == 1 or not self._exchange.compressed or short or self.given_up:
            self.trial.stay()
        elif self._learns_second and self._speaks:
            tell_waits(self._settles_at)
        if total is not None and short and self._speaks:
            tell_too_short(total, config.density, self._stock)

    def give_up(self, why: str) -> None:
        """The present exchange stays until all ranks can go back to the uncompressed one, which then stays."""
        if not self.given_up and self._speaks:
            tell_given_up(why, self._stock)
        self.given_up = True
        self.trial.stay()

    @property
    def _speaks(self) -> bool:
        return self._collectives.rank == 0

    def count(self, half: bool, skipped: bool = False) -> None:
        """Count a step of the uncompressed exchange, in fp16 or not; of one that was skipped its number."""
        buckets = self._exchange.buckets
        width = 2 if half else 4
        buckets.counts.traffic.count_allreduce(width * sum(buckets.numel.values()), buckets.workers)
        buckets.counts.end_step((buckets.steps, OVERFLOW) if skipped else None)
        buckets.steps += 1

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """After a dense step: look whether Adam's second moment has settled, without which nothing is timed."""
        steps = self._exchange.buckets.steps
        if self.trial.ended or not self._settling.is_due(steps):
            return
        own = [0.0] * 6
        if self._speaks:
            compressed = self._exchange.compressed
            unlearnt = sum(not optimizer.state[p]["exp_avg_sq"].any() for p in compressed)
            own = [float(unlearnt), *self._settling.judge(*measured(optimizer, compressed))]
        ranks, unlearnt, *told = self._sum(torch.tensor([1.0, *own], dtype=torch.float64), "settled").tolist()
        if round(ranks) != self._collectives.workers:  # Horovod's join has answered
            return self.give_up(JOINED)
        self._settling.take(told, steps)
        if unlearnt and self._settling.settled_at is not None:
            self.give_up(UNLEARNT)

    def step_ended(self, waited: float) -> bool:
        """Count the time of a step; the ranks compare where it is the last one that is timed.

        Args:
            waited: seconds of it in which the uncompressed exchange was waited for, >= 0.

        Returns:
            Whether the next steps are exchanged in another way: the same on every rank.
        """
        trial, before = self.trial, self.trial.mode
        if self._learns_second and self._settling.settled_at is None:
            return False
        if not trial.step_ended(time.perf_counter(), waited):
            return False
        if self._exchange.buckets.ranks_in_join:
            self.give_up(JOINED)  # those in join answer nothing but steps
            return False
        own = self._means(trial.own())
        if own is None:
            self.give_up(JOINED)
            return False
        if trial.times_more(own[0]):
            return False
        expected: dict[str, float] = {}
        if before == DENSE:
            found = self._expected(*own)
            if found is None:
                self.give_up(SPARSE)
                return False
            trial.dense_timed(own[0], expected := found)
        else:
            trial.tried(own[0])
        self._exchange.buckets.counts.trial_seconds = dict(trial.seconds)
        if self._speaks:
            tell_choice(self._exchange.buckets, trial, expected, self._stock)
        return trial.mode != before

    def _expected(self, step: float, waited: float) -> dict[str, float] | None:
        """Seconds of a step with each exchange that can be tried, by mode; None: gradients are sparse, and none can.

        Args:
            step, waited: seconds of a dense step, and of those the seconds of waiting, the same on every rank.
        """
        found = self._means([*self._link(), *self._obstacles()])
        assert found is not None, "every rank has just answered"
        one, many, numel, sparse, *obstacles = found
        if sparse:
            return None
        expected = predicted(self._exchange.buckets, Observed(step, waited, one, many, numel), self._on_gloo)
        for mode, obstacle in zip((COMPRESSED, HALF), obstacles, strict=True):
            if obstacle:
                del expected[mode]
        return expected

    def _obstacles(self) -> tuple[float, float, float]:
        """Whether this rank has sparse gradients; what keeps it from compression; from half precision."""
        exchange = self._exchange
        gradients = [p.grad for p in exchange.names if p.grad is not None]
        sparse = any(gradient.is_sparse for gradient in gradients)
        # workers of a node might differ in what they clip, see `NodeGradientExchange`
        clips = self.script_clips and exchange.buckets.topology.node_size > 1 and exchange.config.clip_norm is None
        halves = sparse or fits(gradients, exchange.buckets.workers * exchange.loss_scale())
        return float(sparse), float(clips or self.script_accumulates), float(not halves)

    def _means(self, own: Sequence[float]) -> list[float] | None:
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
