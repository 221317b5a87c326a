"""The parts of a torch optimizer that ``DistributedOptimizer`` or ``register`` has wrapped, with Horovod or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgc_horovod.session.auto import Choice
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch import state
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.local import LocalRounds, LocalSteps
from dgc_horovod.torch.session.session import Session, session_of


@dataclass(frozen=True)
class SessionView:
    """The parts of an optimizer as they are now; after the ranks have changed, or a step, look again.

    Args:
        exchange: its exchange: parameters by name, collectives, clipping, engines, counters and config.
        rounds: the rounds of local steps; None without.
        choice: the choice of ``Compression.auto``; None without.
        told: keys of the notices that rank 0 has given once.
        under_way: number of parameters whose gradient of the present step has come.
    """

    exchange: GradientExchange
    rounds: LocalRounds | None
    choice: Choice | None
    told: frozenset[str]
    under_way: int


def session(optimizer: Any) -> SessionView:
    """The parts of `optimizer`, which compresses on this rank."""
    found = _session(optimizer)
    rounds = found.strategy.rounds if isinstance(found.strategy, LocalSteps) else None
    choice = found.strategy.choice if isinstance(found.strategy, AutoTuned) else None
    return SessionView(found.exchange, rounds, choice, frozenset(found.told), len(found.passes.results))


def _session(optimizer: Any) -> Session:
    found = session_of(optimizer)
    assert found is not None
    return found


def take(optimizer: Any, mode: str, on_trial: bool = False) -> None:
    """Let ``Compression.auto`` go on with `mode`, whatever the clock says; on every rank, between two steps.

    Args:
        optimizer: one that chooses.
        mode: DENSE or COMPRESSED of ``planning.trial``.
        on_trial: whether compression is measured now, and the choice still to be made.
    """
    found = _session(optimizer)
    assert isinstance(found.strategy, AutoTuned)
    trial = found.strategy.choice.trial
    if on_trial:
        trial.dense_timed(1.0, 0.1)
    else:
        trial.stay(mode)
    found.strategy.switch(mode)


def kept_by(optimizer: Any) -> ResidualState:
    """The record of what this rank has kept, between two steps."""
    return state.kept_by(_session(optimizer))


def copied(optimizer: Any) -> ResidualState:
    """The same without what stands in the optimizer's state, whatever is under way."""
    return _session(optimizer).kept.record(own=False)
