"""Everything that ranks have kept, applied at once: by dense allreduces, in eager mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from dgc_horovod.core.left import left_of_all
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state.residual_state import RESIDUAL, SECOND
from dgc_horovod.tensorflow.gradients.exchange import GradientExchange
from dgc_horovod.tensorflow.gradients.watchdog import watched
from dgc_horovod.tensorflow.session.session import Application, Own, Session
from dgc_horovod.tensorflow.wrapping.variables import Gradient, is_frozen, key_of, scaled


class WholeApplication(Application):
    """One with gradients of many steps: nothing that is meant for one step clips them."""

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """See `Application`."""
        return list(grads)


def flush(session: Session, own: Own) -> None:
    """See ``flush`` of the optimizer. `own`: its ``apply``, as the user's class has it."""
    optimizer, distribution = session.optimizer, session.distribution
    distribution.ownership.look(session.iterations)
    distribution.residuals()  # errors that should come before anything is changed
    if distribution.ownership.holds_loaded:  # before the first step
        trained = [variable for variable in optimizer._trainable_variables if not is_frozen(variable)]
        distribution.variable_set(trained, trained, session.local)  # of the kind of dense gradients
    if not any(exchange.keeps_state for exchange in distribution.exchanges):
        return
    if distribution.update.arithmetic.flush_is_step and passes_of(optimizer) > 1:
        raise UnsupportedUse("flush() with accumulated gradients has a form under momentum correction only")
    if distribution.settings.config is None:
        return
    (exchange,) = distribution.exchanges
    by_key = {key_of(variable): variable for variable in optimizer._trainable_variables}
    variables = {i: by_key[source.key] for i, source in enumerate(exchange.sources) if i in exchange.steps.place}
    buckets = exchange.steps.buckets
    assert buckets is not None
    left = _left(exchange, buckets)
    # nothing: even a step with a gradient of zeros would move the weights, by momentum and decay
    if not any(kept.any() for parts in left.values() for kept in parts.values()):
        return exchange.steps.take_over_again()
    numbers = list(variables)
    given = [(variables[i], {part: x.reshape(variables[i].shape) for part, x in left[i].items()}) for i in numbers]
    if distribution.update.arithmetic.flush_is_step:
        kept, scale = [None] * len(given), optimizer.loss_scale_factor or 1  # by which Keras divides
        with session.during(WholeApplication()):
            own([scaled(tf.cast(x[RESIDUAL], v.dtype), scale) for v, x in given], [v for v, _ in given])
    else:
        kept = distribution.update.flush(given, distribution.compressed)
    for variable in variables.values():
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
    share = 1 if distribution.settings.averages else exchange.collectives.workers
    for i, v in zip(numbers, kept, strict=True):
        if v is not None:
            exchange.steps.keep(i, {RESIDUAL: np.asarray(v).reshape(-1) / np.float32(share)})
    buckets.second.clear()
    exchange.steps.take_over_again()


def passes_of(optimizer: Any) -> int:
    """How many backward passes a Keras optimizer of ours adds up for a step; 1: none."""
    return getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1


def _left(exchange: GradientExchange, buckets: OptimizerExchange) -> dict[int, dict[str, np.ndarray]]:
    """What all ranks together have kept, by number of the variable and part; u and v are zero here afterwards."""
    steps, collectives = exchange.steps, exchange.collectives
    op = hvd.Average if exchange.settings.averages else hvd.Sum

    def combined(whole: np.ndarray, name: str) -> np.ndarray:
        with watched(collectives.process_set, collectives.full_name(name)):
            return np.asarray(collectives.allreduce(tf.constant(whole), name, op).numpy())

    left, _ = left_of_all(buckets, collectives, combined)
    found: dict[int, dict[str, np.ndarray]] = {}
    for run, parts in zip(steps.runs, left, strict=True):
        if exchange.update.arithmetic.dense_is_stock and not run.engine.bucket.uncompressed:
            parts[SECOND] = steps.second_of(run)
        for segment, i in zip(run.engine.whole.segments, run.members, strict=True):
            found[i] = {part: whole[segment.place] for part, whole in parts.items()}
    return found
