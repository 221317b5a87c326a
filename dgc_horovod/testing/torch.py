"""The parts of a torch optimizer wrapped by ``DistributedOptimizer`` or ``register``, with or without Horovod."""

from __future__ import annotations

from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.torch import state
from dgc_horovod.torch.session.auto import AutoTuned
from dgc_horovod.torch.session.session import Session, session_of


def session(optimizer: object) -> Session:
    """Return the session of `optimizer`, which compresses on this rank.

    Its ``exchange`` has the parameters, collectives, clipping, engines, counters and config, and is replaced when the
    ranks change; ``strategy.rounds`` are those of local steps, ``strategy.choice`` that of ``Compression.auto``.
    """
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
    found = session(optimizer)
    assert isinstance(found.strategy, AutoTuned)
    if on_trial:
        found.strategy.choice.decide(1.0, 0.1)
    else:
        found.strategy.choice.stay(mode)
    found.strategy.switch(mode)


def kept_by(optimizer: object) -> ResidualState:
    """Copy the state of this rank, between two steps."""
    return state.kept_by(session(optimizer))


def copied(optimizer: object) -> ResidualState:
    """Copy the state of this rank without the optimizer's own; possible within a step."""
    return session(optimizer).kept.record(own=False)
