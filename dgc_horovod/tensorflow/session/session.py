"""What is ours about one Keras optimizer: its exchanges, what stays with each rank, and the step under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.session import base
from dgc_horovod.tensorflow.distribution import Distribution
from dgc_horovod.tensorflow.wrapping.variables import Gradient, Key, native

if TYPE_CHECKING:
    from dgc_horovod.tensorflow.session.strategy import Strategy

Own = Callable[..., Any]  # a method of the optimizer, as the user's class has it


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

    def is_split(self, variable: keras.Variable) -> bool:
        """Whether the optimizer's arithmetic has been done before selection."""
        return False


class Session(base.Session[keras.optimizers.Optimizer]):
    """The session of a Keras optimizer.

    Args:
        optimizer: wrapped optimizer, without a LossScaleOptimizer around it.
        distribution: its exchanges.
        kind: class of the strategy.
        passes: Horovod's ``backward_passes_per_step``, >= 1.
        averaged: whether gradients are averaged over the passes, or summed.
        again: function that makes another optimizer distributed in the same way.

    Attributes:
        local: keys of variables that are left to each rank.
        application: call of ``apply`` under way; one of Keras alone where nothing is exchanged in it.
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
    def takes_part(self) -> bool:
        """Whether this rank is in the process set."""
        return self.distribution.takes_part

    @property
    def iterations(self) -> int:
        """Steps that the optimizer has made, in eager mode."""
        return int(self.optimizer.iterations)

    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None, own: Own) -> None:
        """``apply`` of the optimizer, with what the strategy exchanges."""
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        known = self.optimizer._trainable_variables if given is None else given
        if not self.takes_part or len(known) != len(grads) or not known:
            own(grads, given)
        else:
            self._check(known)
            self.strategy.apply(grads, list(known), own)

    def _check(self, variables: Sequence[Any]) -> None:
        if self.scaled_by_another:
            raise UnsupportedUse(self.strategy.no_scaler)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise UnsupportedUse(
                    f"{variable.path!r} is overwritten by its gradient (float8 training), which cannot be combined "
                    "over ranks; use another dtype policy"
                )

    @contextmanager
    def during(self, application: Application) -> Iterator[None]:
        """Inside, `application` is the call of ``apply`` under way."""
        before, self.application = self.application, application
        try:
            yield
        finally:
            self.application = before

    def save(self, variables: Sequence[Any], store: MutableMapping[str, Any]) -> None:
        """Put variables into a file; slots that are empty because the engine has their part get what this rank has."""
        self.distribution.ownership.look(self.iterations)
        rate = float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))
        ours = self.distribution.for_slots(rate)
        for i, variable in enumerate(variables):
            value = ours.get(id(native(variable)))
            store[str(i)] = variable.numpy() if value is None else value


def session_of(optimizer: object) -> Session | None:
    """The session of an optimizer, of a LossScaleOptimizer that of the one inside; None where it has none."""
    found = getattr(optimizer, "_dgc", None)
    return found if isinstance(found, Session) else None
