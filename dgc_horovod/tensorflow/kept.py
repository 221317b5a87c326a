"""Whether a Keras optimizer can go on from a rank's record: looked at before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dgc_horovod.errors import CheckpointError, UnsupportedUse
from dgc_horovod.state.method import CHANGES, check_kept, is_flushed, method_of
from dgc_horovod.state.residual_state import FROZEN_SINCE, ResidualState
from dgc_horovod.tensorflow.updates.base import PlainUpdate
from dgc_horovod.tensorflow.wrapping.variables import Key, is_frozen, key_of

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.distribution import Distribution
    from dgc_horovod.tensorflow.session.session import Session

TRAINED, EXCHANGED = "trained", "exchanged"


def refuse_several(distribution: Distribution, what: str) -> None:
    """Raise UnsupportedUse where there are several exchanges, whose residuals cannot be `what`."""
    if len(distribution.exchanges) > 1:
        raise UnsupportedUse(
            f"residuals of an optimizer that is given several sets of variables cannot be {what}; give each set an "
            'optimizer of its own (a new one can load with residuals="ignored")'
        )


def marked(state: ResidualState | None, distribution: Distribution) -> ResidualState | None:
    """`state`, of this rank, that says what its residuals hold."""
    return state and dataclasses.replace(state, method=_method(distribution))


def check_taken(state: ResidualState, distribution: Distribution) -> None:
    """Raise the error that going on from `state` would end in: CheckpointError, or UnsupportedUse.

    Before the first step nobody knows which variables have gradients, so that their sizes are compared then.
    """
    refuse_several(distribution, "loaded")
    check_kept(state, _method(distribution))
    for exchange in distribution.exchanges:
        buckets = exchange.steps.buckets
        if buckets is not None:
            buckets.check_fits(named(state, distribution.update, [s.key for s in exchange.sources], buckets.numel))


def named(state: ResidualState, update: PlainUpdate, keys: Sequence[Key], names: Iterable[str]) -> ResidualState:
    """`state` without what is the optimizer's own, its tensors by the names of buckets instead of numbers.

    Args:
        state: record of this rank.
        update: form in which gradients enter the residual.
        keys: of the variables that are exchanged.
        names: of the tensors in buckets.

    Raises:
        CheckpointError: it is of another model.
    """
    name_of = {number_of(name): name for name in names}
    rest = dict(state.tensors)
    for i, key in enumerate(keys):
        if str(i) in rest:
            rest[str(i)] = update.without_own(key, rest[str(i)])
    tensors = {name_of.get(number, number): arrays for number, arrays in rest.items() if arrays}
    runs = {name_of.get(number, number): run for number, run in state.runs.items()}
    second = {name_of.get(number, number): values for number, values in state.second.items()}
    return dataclasses.replace(state, tensors=tensors, runs=runs, second=second)


def number_of(name: str) -> str:
    """The number that begins a tensor's name."""
    return name.partition(" ")[0]  # padding has none


def _method(distribution: Distribution) -> str:
    config, update = distribution.settings.config, distribution.update
    return "" if config is None else method_of(config, update.is_split, update.dense_is_stock)


def trained_in(model: Any, session: Session) -> dict[str, list[int] | None]:
    """Which of the model's weights are trained, and which are exchanged where that is known: residuals have numbers.

    Args:
        model: Keras model, built.
        session: session of its optimizer, which is built.

    Returns:
        Indices in ``model.weights``, by `TRAINED` and `EXCHANGED`.
    """
    index = {key_of(weight): i for i, weight in enumerate(model.weights)}
    all_kept = _method(session.distribution) == CHANGES  # of all that the optimizer was built with
    kept = [v for v in session.optimizer._trainable_variables if all_kept or not is_frozen(v)]
    trained = [index.get(key_of(v), -1) for v in kept if key_of(v) not in session.local]
    exchanged = [[index.get(source.key, -1) for source in each.sources] for each in session.distribution.exchanges]
    return {TRAINED: trained, EXCHANGED: exchanged[0] if len(exchanged) == 1 else None}


def of_these(state: ResidualState, then: dict[str, Any], now: dict[str, list[int] | None]) -> ResidualState:
    """`state`, whose tensors have the numbers of those that are trained; without any after a flush, if they do not.

    Args:
        state: record of this rank.
        then, now: what `trained_in` has returned; there is no `then` in checkpoints of earlier versions.

    Raises:
        CheckpointError: the numbers are those of other weights, of which something waits.
    """
    if not state.tensors or TRAINED not in then:
        return state
    exchanged = then.get(EXCHANGED)
    if now[EXCHANGED] is not None and exchanged is not None:
        one, other = exchanged, now[EXCHANGED]
    else:  # a variable may have no gradient, so that not all that are trained are exchanged
        one, other = then[TRAINED], now[TRAINED]
        if one == other and not set(exchanged or ()) <= set(other or ()):
            one = exchanged
    if one == other:
        return state
    if is_flushed(state, state.method == CHANGES):
        return dataclasses.replace(state, tensors={}, runs={}, second={}, thresholds={})
    raise CheckpointError(
        f"the residuals are of other variables: those of model.weights at {_few(one)} were trained, now those at "
        f"{_few(other)}: {FROZEN_SINCE}"
    )


def _few(indices: list[int] | None) -> str:
    told = [str(i) for i in indices or ()]
    return ", ".join([*told[:8], "..."] if len(told) > 8 else told)
