"""One training run: a task, a variant, so many ranks, a seed. The loop is the same for simulated and real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator

from benchmarks.quality.simulation import CompressedRanks, DenseRanks, LocalRanks, LossOf
from benchmarks.quality.tasks import ALL_TASKS, WORKERS, Task
from benchmarks.quality.variants import AFTERWARDS, VARIANTS, Variant
from dgc_horovod.core.bucketing import count_for
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.schedule import density_at

HOPELESS = 50.0  # a training loss, in nats, from which no run comes back
Watch = Callable[["Ranks", int, float], None]  # the ranks, steps done, their loss


class Ranks(Protocol):
    """Ranks that train a task's model a step at a time, simulated or real."""

    optimizer: torch.optim.Optimizer
    exchange: OptimizerExchange | None  # of rank 0, if they compress

    def step(self, loss_of: LossOf) -> float:
        """One step; a training loss."""


MakeRanks = Callable[["Run", Task, torch.optim.Optimizer], Ranks]


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        task: name of one of ALL_TASKS.
        variant: name of one of VARIANTS.
        workers: N.
        seed: of weights and batches.
        length: of the run and its learning-rate schedule, in the task's own; its density warm-up stays as it is.
        real: whether Horovod's own ranks are to do it, not simulated ones.
    """

    task: str
    variant: str
    workers: int = WORKERS
    seed: int = 0
    length: float = 1.0
    real: bool = False

    @property
    def key(self) -> str:
        """Its name in the file of results."""
        by = ", Horovod" if self.real else ""
        return f"{self.task}, {self.variant}, N = {self.workers}, ×{self.length:g}, seed {self.seed}{by}"

    @property
    def steps(self) -> int:
        """Its length."""
        return round(ALL_TASKS[self.task].settings.steps * self.length)

    @property
    def batch(self) -> int:
        """Samples per rank and step: N ranks together have the same whole batch, whatever N."""
        return max(1, ALL_TASKS[self.task].settings.batch * WORKERS // self.workers)


class Counts:
    """The counts of one rank's exchange over a run.

    Args:
        exchange: of rank 0; None for dense training, of which there is nothing to count.
    """

    def __init__(self, exchange: OptimizerExchange | None) -> None:
        self._exchange, self._before = exchange, 0
        self._k_at: dict[float, int] = {}  # by density
        self._since: list[float] = []
        self._closed: list[list[float]] = []

    def count(self) -> None:
        """A step is done."""
        if self._exchange is not None:
            counts, config = self._exchange.counts, self._exchange.config
            k = self._k(density_at(config.density, config.warmup, counts.steps - 1))
            self._since.append((counts.selected - self._before) / k)
            self._before = counts.selected

    def close(self) -> None:
        """The next point of the curve is reached."""
        if self._since:
            mean = sum(self._since) / len(self._since)
            self._closed.append([round(value, 4) for value in (min(self._since), mean, max(self._since))])
            self._since.clear()

    def found(self) -> dict[str, Any]:
        """The counts of a compressed run.

        ``selected``: [least, mean, most] in k up to each point of the curve; ``traffic``: bytes sent, in fp32's.
        """
        if self._exchange is None:
            return {}
        stats = self._exchange.counts.stats()
        return {"selected": self._closed, "traffic": round(stats["bytes_sent"] / max(1, stats["bytes_dense"]), 6)}

    def _k(self, density: float) -> int:
        if density not in self._k_at:
            assert self._exchange is not None
            buckets = [engine.bucket for engine in self._exchange.engines if not engine.bucket.uncompressed]
            self._k_at[density] = sum(count_for(bucket.numel, density) for bucket in buckets)
        return self._k_at[density]


def schedule(step: int, steps: int, ramp: int) -> float:
    """The learning rate in terms of the highest: it rises in `ramp` steps, and falls to 0 like a cosine."""
    return min(1.0, (step + 1) / max(1, ramp)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def simulated(run: Run, task: Task, optimizer: torch.optim.Optimizer) -> Ranks:
    """All ranks in this process."""
    variant: Variant = VARIANTS[run.variant]
    config = variant.config(task.settings, run.workers)
    clip_norm = task.settings.clip_norm if variant.clips == AFTERWARDS else None
    basics = (task.model, optimizer, run.workers, clip_norm)
    if config is None:
        return DenseRanks(*basics)
    if config.local_steps is not None:
        return LocalRanks(task, variant, run.workers, config)
    return CompressedRanks(*basics, config=config, variant=variant, dense_clip_norm=task.settings.clip_norm)


def train(
    run: Run,
    make_ranks: MakeRanks = simulated,
    steps: int | None = None,
    points: int | None = None,
    watch: Watch = lambda ranks, step, loss: None,
) -> dict[str, Any]:
    """Do a run.

    Args:
        run: which.
        make_ranks: who computes the steps.
        steps: stop after so many; None: all.
        points: of the curve; None: as many as the task has; 0: nothing is tested.
        watch: called after every step.

    Returns:
        ``curve`` of [step, test loss, test accuracy]; whether it has ``diverged``, that is, broke off or is hopeless;
        the last ``loss`` and ``accuracy``, None where it has; what `Counts.found` gives of rank 0.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a run that diverges would take several times as long
    task = ALL_TASKS[run.task](run.seed)
    optimizer = VARIANTS[run.variant].make_optimizer(task.model, task.settings)
    highest, ranks = optimizer.param_groups[0]["lr"], make_ranks(run, task, optimizer)
    draws = [Generator().manual_seed(1000 * run.seed + rank) for rank in range(run.workers)]
    points = task.points if points is None else points
    curve, counts, every = [], Counts(ranks.exchange), max(1, run.steps // points) if points else 0
    end = steps or run.steps
    for step in range(end):
        for group in ranks.optimizer.param_groups:
            group["lr"] = highest * schedule(step, run.steps, task.settings.ramp)
        loss = ranks.step(lambda rank: task.loss(run.batch, draws[rank]))
        counts.count()
        watch(ranks, step + 1, loss)
        if not loss < HOPELESS:
            break
        if every and ((step + 1) % every == 0 or step + 1 == end):
            quality = task.quality()
            if not math.isfinite(quality.loss):
                break
            curve.append([step + 1, round(quality.loss, 4), round(quality.accuracy, 5)])
            counts.close()
    diverged = not curve or curve[-1][0] < end or is_hopeless(*curve[-1][1:], task.classes)
    last = [None, None] if diverged else curve[-1][1:]
    return {"curve": curve, "diverged": diverged, "loss": last[0], "accuracy": last[1], **counts.found()}


def is_hopeless(loss: float, accuracy: float, classes: int) -> bool:
    """Whether a model's loss is above that of equal probabilities, and it is wrong more often than right.

    One that is right more often is overconfident, whatever its loss: so are long runs on few images, also dense ones.
    """
    return loss > math.log(classes) and accuracy < 0.5
