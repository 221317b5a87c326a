"""What stands over the methods of a Keras optimizer: thin calls of its session."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn

import keras
import tensorflow as tf

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.clipping.of_optimizer import KINDS, check_change
from dgc_horovod.tensorflow.session.session import Session
from dgc_horovod.tensorflow.state import flush
from dgc_horovod.tensorflow.wrapping.variables import Gradient, keys_of, native

# AutoGraph would rewrite these methods when a tf.function of the user calls them.
not_converted: Any = tf.autograph.experimental.do_not_convert
UsersClass: Any = object  # over which the methods are put


class Methods(UsersClass):
    """Over a Keras optimizer, a LossScaleOptimizer too; the latter has the session of the optimizer inside."""

    _dgc: Session

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """As Keras'; the slots that are empty because the engine has their part get what this rank has."""
        self._dgc.save(self.variables, store)

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """As Keras'; u and v belong to the weights before and start from zero.

        With local steps the round under way is given up, and outer momentum.
        """
        super().load_own_variables(store)
        self._dgc.distribution.ownership.reloaded()
        self._dgc.strategy.forget()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """As Keras'; u and v belong to the weights before and start from zero."""
        super().set_weights(weights)
        self._dgc.distribution.ownership.reloaded()  # of the model's weights it says nothing: a local round goes on

    def register_local_var(self, var: keras.Variable | Iterable[keras.Variable]) -> None:
        """Leave `var` to each rank: its gradient is not exchanged (and divided by N, if scale_local_gradients).

        With local steps what it changes by is not exchanged; before the first step.
        """
        self._dgc.strategy.check_not_begun()
        self._dgc.local |= keys_of(var, "var")

    def set_epoch(self, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is; our callbacks do it in ``model.fit``."""
        self._dgc.distribution.set_epoch(epoch)

    def clear_residuals(self) -> None:
        """Empty u and v on this rank: for a script that has set the weights to others.

        With local steps: `e` and outer momentum, and a round begins with the weights that the script has set. Every
        rank calls it, and has set them to the same.
        """
        self._dgc.distribution.ownership.clear()
        self._dgc.strategy.forget()
        self._dgc.strategy.begin_anew()

    def residual_state_dict(self) -> dict[str, Any]:
        """What this rank has kept of gradients that the model has not had yet: training state, of this rank alone.

        Returns:
            A dict of numbers and arrays, copies; empty before the first step and without compression. With local steps
            the slots of SGD, Adam and AdamW are in it, too.

        Raises:
            UnsupportedUse: there are several sets of variables; a round of local steps is under way.
        """
        self._dgc.strategy.check_between_steps()
        self._dgc.distribution.ownership.look(self._dgc.iterations)
        state = self._dgc.distribution.residuals()
        return {} if state is None else state.to_dict()

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, from ``residual_state_dict()`` of this rank; after weights and optimizer were loaded.

        Raises:
            CheckpointError: it is of another rank, another number of ranks or another model.
            UnsupportedUse: a round of local steps is under way.
        """
        self._dgc.strategy.check_between_steps()
        if state_dict != {}:
            self._dgc.distribution.resume(ResidualState.from_dict(state_dict), self._dgc.iterations)

    def compression_stats(self) -> dict[str, Any]:
        """What this rank has exchanged since it was wrapped: fields as in ``dgc_horovod.torch``."""
        return self._dgc.distribution.stats()

    def __copy__(self, *args: object) -> NoReturn:
        raise UnsupportedUse("a copy would train undistributed; copy the Keras optimizer, then wrap the copy")

    __deepcopy__ = __reduce_ex__ = __copy__


class Overrides(Methods):
    """Over a Keras optimizer: gradients are exchanged after accumulation and unscaling, before anything else.

    Keras calls ``apply`` -> ``_clip_gradients`` (here they are exchanged) -> ``_apply_weight_decay`` ->
    ``_backend_update_step`` -> ``update_step``.
    """

    @not_converted
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> None:
        """As Keras', with the gradients of all ranks; with local steps on this rank alone, perhaps then an exchange."""
        self._dgc.apply(grads, trainable_variables, super().apply)

    def _clip_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        return self._dgc.application.clip_gradients(grads, super()._clip_gradients)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        self._dgc.application.decay(variables, super()._apply_weight_decay)

    def _backend_update_step(self, *arguments: object) -> None:
        step = partial(super()._backend_update_step, *arguments)
        self._dgc.application.update(step, super()._apply_weight_decay)

    def update_step(self, gradient: Gradient, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        """As the optimizer's own; ``w -= lr * mean(s)`` where its arithmetic has been done before selection."""
        if not self._dgc.application.is_split(variable):
            return super().update_step(gradient, variable, learning_rate)
        target = native(variable)
        if target.dtype == gradient.dtype:
            rate = keras.ops.cast(learning_rate, target.dtype)
            tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=rate, delta=gradient)
        else:
            change = gradient * keras.ops.cast(learning_rate, gradient.dtype)
            target.assign_sub(tf.cast(change, target.dtype))

    def build(self, variables: Sequence[Any]) -> None:
        """As Keras'. Accumulators of ``backward_passes_per_step`` are each rank's own: not saved, not broadcast."""
        super().build(variables)
        if self._dgc.passes > 1:
            for accumulator in self._accumulated_gradients:
                self._untrack_variable(accumulator)

    def get_config(self) -> dict[str, Any]:
        """As Keras', of the wrapped optimizer."""
        config = super().get_config()
        return {**config, "gradient_accumulation_steps": None} if self._dgc.passes > 1 else config

    def flush(self) -> None:
        """Apply everything that the ranks have kept, by one dense exchange: no residual is left on any rank.

        Momentum goes into the optimizer's slots, so that a saved model is a stock one of which nothing is missing. SGD:
        ``w -= lr*mean(v)``, ``velocity -= lr*mean(u)``, exact. Adam: the same for v, and the velocity is the second
        moment that all ranks share; what coding has left of small variables stays. Other optimizers, and methods
        without momentum correction: a step of theirs with ``mean(v)`` as gradient. With local steps the round under way
        is exchanged first. Every rank must call it, between two steps, in eager mode.

        Cost: an fp32 allreduce of v and of u.
        """
        self._dgc.strategy.before_flush()
        flush(self._dgc, super().apply)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # LossScaleOptimizer does so to the one that it wraps
            self._dgc.scaled_by_another = True
        if name in KINDS:
            check_change(self, self._dgc.distribution.settings.config, name, value)
        super().__setattr__(name, value)


class LocalOverrides(Overrides):
    """Those of an optimizer with local steps."""

    @not_converted
    def exchange(self) -> None:
        """Exchange what the weights have changed by since the last time; every rank calls it, between two steps.

        Afterwards the weights are the same on every rank. ``apply`` does it every ``local_steps`` steps.
        """
        self._dgc.strategy.conclude()


class AgreedScaling(Methods):
    """Over a LossScaleOptimizer whose inner optimizer is distributed: an overflow on one rank is one on all."""

    @not_converted
    def check_finite(self, grads: Sequence[Gradient]) -> tf.Tensor:
        """Whether every gradient of every rank is finite. One small collective."""
        return self._dgc.distribution.all_agree(super().check_finite(grads))

    def flush(self) -> None:
        """See `Overrides`."""
        self.inner_optimizer.flush()
