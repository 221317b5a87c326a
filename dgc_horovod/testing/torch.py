"""The parts of a torch optimizer that ``DistributedOptimizer`` or ``register`` has wrapped, with Horovod or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.torch.auto.choice import OptimizerChoice
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.local.rounds import LocalRounds


@dataclass(frozen=True)
class SessionView:
    """The parts of an optimizer as they are now; after the ranks have changed, or a step, look again.

    Args:
        exchange: its exchange: parameters by name, collectives, clipping, what this rank keeps.
        buckets: the engines of the exchange, their state, counters and config.
        rounds: the rounds of local steps; None without.
        choice: the choice of ``Compression.auto``; None without.
        told: keys of the notices that rank 0 has given once.
    """

    exchange: GradientExchange
    buckets: OptimizerExchange
    rounds: LocalRounds | None
    choice: OptimizerChoice | None
    told: frozenset[str]


def session(optimizer: Any) -> SessionView:
    """The parts of `optimizer`, which compresses on this rank."""
    exchange: GradientExchange = optimizer._dgc
    rounds, choice = getattr(optimizer, "_dgc_rounds", None), getattr(optimizer, "_dgc_choice", None)
    return SessionView(exchange, exchange.buckets, rounds, choice, frozenset(optimizer._dgc_told))


def take(optimizer: Any, mode: str, on_trial: bool = False) -> None:
    """Let ``Compression.auto`` go on with `mode`, whatever the clock says; on every rank, between two steps.

    Args:
        optimizer: one that chooses.
        mode: DENSE, HALF or COMPRESSED of ``planning.trial``.
        on_trial: whether that is measured now, and the choice still to be made.
    """
    trial = optimizer._dgc_choice.trial
    if on_trial:
        trial.dense_timed(1.0, {mode: 0.1})
    else:
        trial.stay(mode)
    optimizer._dgc_switch(mode)


def stand_in(optimizer: torch.optim.Optimizer, exchange: Any) -> None:
    """Let updates, rounds and scalers find `exchange` on a plain `optimizer`, as on a wrapped one."""
    vars(optimizer)["_dgc"] = exchange
