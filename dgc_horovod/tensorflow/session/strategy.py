"""When a session exchanges, and what: gradients at every step, or weights after every so many (`local`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.tensorflow.broadcast import shared_variables
from dgc_horovod.tensorflow.clipping.of_optimizer import clipped
from dgc_horovod.tensorflow.wrapping.variable_set import VariableSet
from dgc_horovod.tensorflow.wrapping.variables import Gradient, is_frozen, key_of, native, scaled

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.session.session import Session

Own = Callable[..., Any]  # a method of the optimizer, as the user's class has it
OWN_APPLY = (
    "{name} steps in an apply() of its own, in which nothing is exchanged: the ranks would train apart. Use a "
    "DistributedGradientTape, and give what it returns to {name}"
)


class Application:
    """One call of ``apply``, while it is traced or run; here one of Keras alone."""

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """What Keras steps with: gradients that are accumulated and unscaled."""
        return own(grads)

    def decay(self, variables: Sequence[Any], own: Own) -> None:
        """Decay the weights."""
        own(variables)

    def update(self, step: Callable[[], None], decay: Own) -> None:
        """Step the weights."""
        step()

    def is_split(self, variable: Any) -> bool:
        """Whether the optimizer's arithmetic has been done before selection."""
        return False


class WholeApplication(Application):
    """One with gradients of many steps: nothing that is meant for one step clips them."""

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """See `Application`."""
        return list(grads)


class ExchangedApplication(Application):
    """One with the gradients of all ranks.

    Args:
        session: session of the optimizer.
        variables: agreed set of the variables.
        known: the variables.
    """

    def __init__(self, session: Session, variables: VariableSet, known: Sequence[Any]) -> None:
        self._session, self._variables, self._known = session, variables, known
        self.exchanged = False  # whether Keras' ``apply`` has come to the exchange
        self._finite: tf.Tensor | None = None
        self._dense: tf.Tensor | None = None
        self._split = False  # whether compressed variables are stepped by what comes back alone
        self._decayed: Sequence[Any] = ()

    def clip_gradients(self, grads: Sequence[Gradient], own: Own) -> list[Gradient]:
        """Exchange them, before anything clips them."""
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
            if not automatic or variables.local[i]:  # else it depends on what the step takes, see `AutomaticExchange`
                gradients[i] = clipped(gradients[i], optimizer, settings, variables.local[i])
        if variables.exchange is not None:
            active = [gradients[i] for i in variables.active]
            weights = [native(self._known[i]) for i in variables.active]
            # with local weights, of the optimizer's variables only its iterations are the same on every rank
            shared = [optimizer.iterations] if any(variables.local) else shared_variables(optimizer)
            rate, everything = optimizer._get_current_learning_rate(), [*weights, *map(native, shared)]
            exchanged = variables.exchange(active, optimizer.iterations, rate, weights, everything)
            self._finite, self._dense = exchanged.finite, exchanged.dense
            gradients.update(zip(variables.active, exchanged.gradients, strict=True))
        results = list(gradients.values())
        if settings.config is not None:
            return results
        limit = settings.clip_norm  # of a choice that has ended in no compression
        return own(results if limit is None else list(tf.clip_by_global_norm(results, limit)[0]))

    def decay(self, variables: Sequence[Any], own: Own) -> None:
        """Under the condition of `update`."""
        if self._finite is None:
            own(variables)
        else:
            self._decayed = variables

    def update(self, step: Callable[[], None], decay: Own) -> None:
        """Step if what has come back is finite, on every rank or on none."""
        if self._finite is None:
            return step()

        def update(split: bool) -> bool:
            self._split = split
            decay(self._decayed)
            step()
            return True

        def either() -> Any:
            if self._dense is None:
                return update(self._session.distribution.update.is_split)
            return tf.cond(self._dense, lambda: update(False), lambda: update(True))

        return tf.cond(self._finite, either, lambda: False)

    def is_split(self, variable: Any) -> bool:
        """See `Application`."""
        return self._split and key_of(variable) in self._variables.compressed


class Strategy:
    """What a step of one session is; between two steps, nothing is to be done.

    Args:
        session: session that has it.
    """

    no_scaler: str  # what is wrong with a LossScaleOptimizer around the optimizer

    def __init__(self, session: Session) -> None:
        self.session: Session = weakref.proxy(session)  # which owns this

    def apply(self, grads: list[Gradient], variables: list[Any], own: Own) -> None:
        """One step. `own`: the optimizer's ``apply``."""
        raise NotImplementedError

    def finish_round(self) -> None:
        """End what spans several steps, on every rank."""

    def before_flush(self) -> None:
        """The script flushes, on every rank."""

    def outer(self) -> list[tf.Variable]:
        """Variables that belong to a checkpoint and not to Keras' optimizer, which is built."""
        return []

    def begin_anew(self) -> None:
        """All ranks have the weights of a checkpoint of ours, or of a script."""

    def restart(self) -> None:
        """The weights are others, and what is known of those before is worth nothing."""

    def check_not_begun(self) -> None:
        """Raise UnsupportedUse where which variables are exchanged is fixed."""

    def check_between_rounds(self) -> None:
        """Raise UnsupportedUse within a round, of which a record holds nothing."""


class EveryStep(Strategy):
    """The optimizer steps with the gradients of all ranks."""

    no_scaler = (
        "a LossScaleOptimizer was put around this DistributedOptimizer (or its loss_scale_factor was taken "
        "away): a rank whose gradient overflows would leave the others waiting. Put it inside: "
        "DistributedOptimizer(LossScaleOptimizer(optimizer)). A MultiOptimizer does so too: use a "
        "DistributedGradientTape with it"
    )

    def apply(self, grads: list[Gradient], variables: list[Any], own: Own) -> None:
        """See `Strategy`; what Keras would leave out is not exchanged either."""
        session = self.session
        here = [i for i, variable in enumerate(variables) if grads[i] is not None or not is_frozen(variable)]
        if here:
            variables, grads = [variables[i] for i in here], [grads[i] for i in here]
        agreed = session.distribution.variable_set(variables, grads, session.local)
        application = ExchangedApplication(session, agreed, variables)
        with session.during(application):
            own(agreed.completed(grads), variables)
        if not (application.exchanged or session.optimizer.gradient_accumulation_steps):
            raise UnsupportedUse(OWN_APPLY.format(name=type(session.optimizer).__name__))
