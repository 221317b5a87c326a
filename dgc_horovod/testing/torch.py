"""The parts of a torch optimizer wrapped by ``DistributedOptimizer`` or ``register``, with or without Horovod."""

from __future__ import annotations

from dataclasses import dataclass

from dgc_horovod.session.auto import Choice
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch import state
from dgc_horovod.torch.gradients.exchange import GradientExchange
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.local import LocalRounds, LocalSteps
from dgc_horovod.torch.session.session import Session, session_of


@dataclass(frozen=True)
class SessionView:
    """The parts of an optimizer at one time; take a new view after a step or a change of ranks.

    Args:
        exchange: exchange: parameters by name, collectives, clipping, engines, counters and config.
        rounds: rounds of local steps; None without local steps.
        choice: choice of ``Compression.auto``; None without auto.
        told: keys of the notices that rank 0 has given.
        under_way: number of parameters whose gradient of the present step is there.
    """

    exchange: GradientExchange
    rounds: LocalRounds | None
    choice: Choice | None
    told: frozenset[str]
    under_way: int


def session(optimizer: object) -> SessionView:
    """Return the parts of `optimizer`, which compresses on this rank."""
    found = _session(optimizer)
    rounds = found.strategy.rounds if isinstance(found.strategy, LocalSteps) else None
    choice = found.strategy.choice if isinstance(found.strategy, AutoTuned) else None
    return SessionView(found.exchange, rounds, choice, frozenset(found.told), len(found.passes.results))


def _session(optimizer: object) -> Session:
    found = session_of(optimizer)
    assert found is not None
    return found


def take(optimizer: object, mode: str, on_trial: bool = False) -> None:
    """Make ``Compression.auto`` use `mode` without measuring; call it on every rank, between two steps.

    Args:
        optimizer: optimizer with ``Compression.auto``.
        mode: DENSE or COMPRESSED of ``planning.trial``.
        on_trial: whether compression is on trial, and the choice is still to be made.
    """
    found = _session(optimizer)
    assert isinstance(found.strategy, AutoTuned)
    trial = found.strategy.choice.trial
    if on_trial:
        trial.dense_timed(1.0, 0.1)
    else:
        trial.stay(mode)
    found.strategy.switch(mode)


def kept_by(optimizer: object) -> ResidualState:
    """Copy the state of this rank, between two steps."""
    return state.kept_by(_session(optimizer))


def copied(optimizer: object) -> ResidualState:
    """Copy the state of this rank without the optimizer's own; possible within a step."""
    return _session(optimizer).kept.record(own=False)
