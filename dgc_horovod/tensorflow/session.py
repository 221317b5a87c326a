"""The owner of a Keras optimizer's steps, the strategy that exchanges at every step, flushes and ``hvd.join()``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from dgc_horovod.errors import CollectiveTimeout, UnsupportedUse
from dgc_horovod.names import put_around
from dgc_horovod.notices import JOINED
from dgc_horovod.session import base
from dgc_horovod.state.residual_state import RESIDUAL, SECOND
from dgc_horovod.tensorflow.distribution import Distribution, of_tapes
from dgc_horovod.tensorflow.gradients.exchange import Exchanged, GradientExchange, StepInputs
from dgc_horovod.tensorflow.gradients.transport import Collectives, watched
from dgc_horovod.tensorflow.settings import clipped
from dgc_horovod.tensorflow.variables import (
    Gradient,
    Key,
    VariableSet,
    is_frozen,
    is_of_tape,
    key_of,
    native,
    scaled,
    shared_variables,
)

Own = Callable[..., Any]  # a method of the user's class of optimizer


class Application:
    """One call of ``apply``, while it is traced or run; this class is for a call without an exchange."""

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """Return the gradients that Keras steps with; `grads` are accumulated and unscaled."""
        return own(grads)

    def decay(self, variables: Sequence[Any], own: Own) -> None:
        """Decay the weights."""
        own(variables)

    def update(self, step: Callable[[], None]) -> None:
        """Step the weights."""
        step()

    def is_split(self, variable: keras.Variable) -> bool:
        """Whether the optimizer's arithmetic has been done before selection."""
        return False


class Session(base.Session[keras.optimizers.Optimizer]):
    """The session of a Keras optimizer.

    Args:
        optimizer: wrapped optimizer, without a LossScaleOptimizer around it.
        distribution: exchanges of the optimizer.
        kind: class of the strategy.
        passes: Horovod's ``backward_passes_per_step``, >= 1.
        averaged: whether gradients are averaged over the passes, or summed.
        again: function that makes another optimizer distributed in the same way.

    Attributes:
        local: keys of variables whose gradients are not exchanged.
        application: call of ``apply`` under way, `Application` if nothing is exchanged in it.
        scaled_by_another: whether a LossScaleOptimizer was put around the optimizer.
    """

    strategy: Strategy
    application, scaled_by_another = Application(), False

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        distribution: Distribution,
        kind: type[Strategy],
        passes: int,
        averaged: bool,
        again: Own,
    ) -> None:
        super().__init__(optimizer)
        self.distribution, self.passes, self.averaged, self.again = distribution, passes, averaged, again
        self.local: set[Key] = set()
        self.strategy = kind(self)
        self.enter()

    @property
    def speaks(self) -> bool:
        return bool(self.distribution.settings.process_set.rank() == 0)

    @property
    def iterations(self) -> int:
        """Number of steps that the optimizer has made, in eager mode."""
        return int(self.optimizer.iterations)

    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None, own: Own) -> None:
        """Run ``apply`` of the optimizer with the exchange of the strategy."""
        grads = list(grads)
        if any(map(is_of_tape, grads)):
            raise UnsupportedUse(
                "gradients of a DistributedGradientTape are given to a DistributedOptimizer, which would exchange and "
                "compress them a second time; use one of the two"
            )
        given = None if trainable_variables is None else list(trainable_variables)
        known = self.optimizer._trainable_variables if given is None else given
        if not self.distribution.takes_part or len(known) != len(grads) or not known:
            own(grads, given)
        else:
            if self.scaled_by_another:
                raise UnsupportedUse(self.strategy.no_scaler)
            for variable in known:
                if getattr(variable, "overwrite_with_gradient", False):
                    raise UnsupportedUse(
                        f"{variable.path!r} is overwritten by its gradient (float8 training), which cannot be "
                        "combined over ranks; use another dtype policy"
                    )
            self.strategy.apply(grads, list(known), own)

    @contextmanager
    def during(self, application: Application) -> Iterator[None]:
        """Set the call of ``apply`` under way to `application` inside."""
        before, self.application = self.application, application
        try:
            yield
        finally:
            self.application = before


def session_of(optimizer: object) -> Session | None:
    """Return the session of an optimizer, or of the one inside a LossScaleOptimizer; None if there is none."""
    found = getattr(optimizer, "_dgc", None)
    return found if isinstance(found, Session) else None


class ExchangedApplication(Application):
    """An application with the gradients of all ranks.

    Args:
        session: session of the optimizer.
        variables: agreed set of the variables.
        known: the variables.
    """

    def __init__(self, session: Session, variables: VariableSet, known: Sequence[Any]) -> None:
        self._session, self._variables, self._known = session, variables, known
        self.exchanged = False  # whether Keras' ``apply`` has reached the exchange
        self._found = Exchanged([])
        self._split = False  # whether compressed variables are stepped by the exchanged sum alone
        self._decay: Callable[[], None] = lambda: None

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """Exchange the gradients, before anything clips them."""
        self.exchanged = True
        session, variables = self._session, self._variables
        optimizer, settings = session.optimizer, session.distribution.settings
        automatic = settings.config is not None and settings.config.automatic
        # Keras has left out those without a gradient, and averaged over the passes
        passes = 1 if session.averaged else session.passes
        gradients = {i: scaled(g, passes) for i, g in zip(variables.given, grads, strict=True)}
        for i in gradients:
            if variables.local[i]:
                gradients[i] = scaled(gradients[i], settings.local_scale)
            if not automatic or variables.local[i]:  # else it depends on the step's branch, see `AutomaticExchange`
                gradients[i] = clipped(gradients[i], optimizer, settings, variables.local[i])
        if variables.exchange is not None:
            active = [gradients[i] for i in variables.active]
            weights = [native(self._known[i]) for i in variables.active]
            # with local weights, of the optimizer's variables only its iterations are the same on every rank
            shared = [optimizer.iterations] if any(variables.local) else shared_variables(optimizer)
            rate, everything = optimizer._get_current_learning_rate(), [*weights, *map(native, shared)]
            self._found = variables.exchange(active, StepInputs(optimizer.iterations, rate, weights, everything))
            gradients.update(zip(variables.active, self._found.gradients, strict=True))
        results = list(gradients.values())
        if settings.config is not None:
            return results
        limit = settings.clip_norm  # set if compression auto has chosen no compression
        return own(results if limit is None else list(tf.clip_by_global_norm(results, limit)[0]))

    def decay(self, variables: Sequence[Any], own: Own) -> None:
        """Decay the weights, under the condition of `update`."""
        self._decay = partial(own, variables)
        if self._found.finite is None:
            self._decay()

    def update(self, step: Callable[[], None]) -> None:
        """Step if the exchanged update is finite, on every rank or on none."""
        if self._found.finite is None:
            return step()

        def update(split: bool) -> bool:
            self._split = split
            self._decay()
            step()
            return True

        def either() -> Any:
            if self._found.dense is None:
                return update(self._session.distribution.update.arithmetic.is_split)
            return tf.cond(self._found.dense, lambda: update(False), lambda: update(True))

        return tf.cond(self._found.finite, either, lambda: False)

    def is_split(self, variable: keras.Variable) -> bool:
        """See `Application`."""
        exchange = self._variables.exchange
        return self._split and exchange is not None and key_of(variable) in exchange.compressed


class Strategy(base.Strategy[Session, tf.Variable]):
    """The steps of one session.

    Args:
        session: session that has it.
    """

    no_scaler: str  # error text for a LossScaleOptimizer around the optimizer

    def apply(self, grads: list[Gradient], variables: list[Any], own: Own) -> None:
        """Make one step. `own`: ``apply`` of the user's class."""
        raise NotImplementedError

    def begin_anew(self) -> None:
        """Begin anew: all ranks have the weights of a checkpoint of ours, or of a script."""

    def check_not_begun(self) -> None:
        """Raise UnsupportedUse if the set of exchanged variables is fixed already."""


class EveryStep(Strategy):
    """The optimizer steps with the gradients of all ranks."""

    no_scaler = (
        "a LossScaleOptimizer was put around this DistributedOptimizer (or its loss_scale_factor was removed): if a "
        "gradient overflows on one rank, the others would wait for it. Put it inside: "
        "DistributedOptimizer(LossScaleOptimizer(optimizer)). A MultiOptimizer removes the factor too: use a "
        "DistributedGradientTape with it"
    )

    def apply(self, grads: list[Gradient], variables: list[Any], own: Own) -> None:
        """See `Strategy`; gradients that Keras ignores are not exchanged."""
        session = self.session
        here = [i for i, variable in enumerate(variables) if grads[i] is not None or not is_frozen(variable)]
        if here:
            variables, grads = [variables[i] for i in here], [grads[i] for i in here]
        agreed = session.distribution.variable_set(variables, grads, session.local)
        application = ExchangedApplication(session, agreed, variables)
        with session.during(application):
            own(agreed.completed(grads), variables)
        if not (application.exchanged or session.optimizer.gradient_accumulation_steps):
            name = type(session.optimizer).__name__
            raise UnsupportedUse(
                f"{name} steps in an apply() of its own, in which nothing is exchanged: the ranks would diverge. Use a "
                f"DistributedGradientTape, and give its gradients to {name}"
            )


# -- flushes


class WholeApplication(Application):
    """An application of gradients of many steps, which are not clipped by limits for one step."""

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """See `Application`."""
        return list(grads)


def flush(session: Session, own: Own) -> None:
    """See ``flush`` of the optimizer. `own`: ``apply`` of the user's class."""
    optimizer, distribution = session.optimizer, session.distribution
    distribution.ownership.look(session.iterations)
    distribution.residuals()  # raises its errors before anything is changed
    if distribution.ownership.holds_loaded:  # before the first step
        trained = [variable for variable in optimizer._trainable_variables if not is_frozen(variable)]
        distribution.variable_set(trained, trained, session.local)  # as for dense gradients
    if not any(exchange.keeps_state for exchange in distribution.compressing):
        return
    if distribution.update.arithmetic.flush_is_step and passes_of(optimizer) > 1:
        raise UnsupportedUse("flush() with accumulated gradients is supported under momentum correction only")
    (exchange,) = distribution.compressing
    steps, update = exchange.steps, distribution.update
    variables, left = {key_of(variable): variable for variable in optimizer._trainable_variables}, _left(exchange)
    # even a step with a gradient of zeros would move the weights, by momentum and decay
    if not any(kept.any() for parts in left.values() for kept in parts.values()):
        steps.in_slots = True
        return
    given = {i: variables[exchange.sources[i].key] for i in sorted(left)}
    if update.arithmetic.flush_is_step:
        scale = optimizer.loss_scale_factor or 1  # by which Keras divides
        with session.during(WholeApplication()):
            own([scaled(tf.cast(left[i][RESIDUAL], v.dtype), scale) for i, v in given.items()], list(given.values()))
    else:
        share = 1 if distribution.settings.averages else exchange.collectives.workers
        rate, compressed = float(optimizer.learning_rate), exchange.compressed
        for i, v in given.items():
            key = key_of(v)
            kept = update.hand_back(key, native(v), left[i], rate, key in compressed, ends=True)
            if kept is not None:
                steps.buckets.keep(steps.names[i], {RESIDUAL: np.asarray(kept).reshape(-1) / np.float32(share)})
    for variable in given.values():
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
    steps.buckets.second.clear()
    steps.in_slots = True


def passes_of(optimizer: keras.optimizers.Optimizer) -> int:
    """Return the number of backward passes that a distributed Keras optimizer accumulates for a step, >= 1."""
    return getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps or 1


def _left(exchange: GradientExchange) -> dict[int, dict[str, np.ndarray]]:
    """Combine the state of all ranks, by number of the variable and part, in its shape; u and v are zero afterwards."""
    steps, collectives = exchange.steps, exchange.collectives
    op = hvd.Average if exchange.settings.averages else hvd.Sum

    def combined(whole: np.ndarray, name: str) -> np.ndarray:
        with watched(collectives.process_set, collectives.full_name(name)):
            return np.asarray(collectives.allreduce(tf.constant(whole), name, op).numpy())

    left, _ = base.left_of_all(steps.buckets, collectives, combined)
    found: dict[int, dict[str, np.ndarray]] = {}
    for run, parts in zip(steps.runs, left, strict=True):
        if exchange.update.arithmetic.has_second and not run.engine.bucket.uncompressed:
            parts[SECOND] = steps.second_of(run)
        for segment, i in zip(run.engine.whole.segments, run.members, strict=True):
            found[i] = {part: x[segment.place].reshape(exchange.sources[i].shape) for part, x in parts.items()}
    return found


# -- hvd.join(), which is possible after the same number of steps on all ranks

# While a rank is in it, no packet can be exchanged: the allgather of the others ends Horovod's background loop with
# "unordered_map::at". So the ranks meet before they join.
_UNEVEN = (
    "hvd.join(): another rank did not call it. With compressed gradients in TensorFlow it cannot wait for ranks that "
    "have more data: give every rank the same number of steps (drop_remainder, steps_per_epoch, "
    "dataset.repeat().take(n)), or use compression none"
)


def _of_optimizers() -> list[Distribution]:
    return [session.distribution for session in base.sessions() if isinstance(session, Session)]


def has_unused() -> bool:
    """Whether a compressed optimizer has made no step so far."""
    return any(each.settings.config is not None and not each.used for each in _of_optimizers())


@put_around(mpi_ops.MPI_LIB, "horovod_join")  # wherever a script imports it from
def _join(stock: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    gc.collect()  # optimizers that nothing refers to, which may be gone already on other ranks
    every = [*_of_optimizers(), *of_tapes.values()]
    if any(each.takes_part and each.compresses for each in every):
        _meet()
    for exchange in [exchange for each in every for exchange in each.choosing]:
        if not exchange.choice.ended:
            exchange.choice.give_up(JOINED)
    return stock(*args, **kwargs)


def _meet() -> None:
    """Wait until every rank has called join.

    Raises:
        UnsupportedUse: another rank did not come within DGC_TIMEOUT seconds; its next step fails there too.
    """
    if not tf.executing_eagerly():
        raise UnsupportedUse("hvd.join() inside a tf.function, while gradients are compressed; call it outside")
    try:
        Collectives(hvd.global_process_set, "join").gather_bytes(b"here", "meeting")
    except (CollectiveTimeout, tf.errors.OpError) as error:  # whichever rank's time is over first ends Horovod
        raise UnsupportedUse(_UNEVEN) from error
