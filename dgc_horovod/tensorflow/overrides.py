"""Methods over those of a Keras optimizer: thin calls of its session."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, NoReturn

import keras
import tensorflow as tf

from dgc_horovod.config import whole_epoch
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.session import Session, flush
from dgc_horovod.tensorflow.settings import CLIPPINGS, check_change
from dgc_horovod.tensorflow.variables import Gradient, keys_of, native

# AutoGraph would rewrite these methods when a tf.function of the user calls them.
not_converted: Any = tf.autograph.experimental.do_not_convert
UsersClass: Any = object  # the base at run time is the user's class


class Methods(UsersClass):
    """Methods over a Keras optimizer, also a LossScaleOptimizer, which has the session of the optimizer inside."""

    _dgc: Session

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Save as Keras does; slots that the engine has taken over get its values."""
        self._dgc.distribution.ownership.look(self._dgc.iterations)
        rate = float(keras.ops.convert_to_numpy(self._dgc.optimizer.learning_rate))
        ours = self._dgc.distribution.for_slots(rate)
        for i, variable in enumerate(self.variables):
            value = ours.get(id(native(variable)))
            store[str(i)] = variable.numpy() if value is None else value

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Load as Keras does; u and v, which belong to the weights before, start from zero.

        With local steps the round under way and outer momentum are dropped.
        """
        super().load_own_variables(store)
        self._dgc.distribution.ownership.reloaded()
        self._dgc.strategy.forget()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set weights as Keras does; u and v, which belong to the weights before, start from zero."""
        super().set_weights(weights)
        self._dgc.distribution.ownership.reloaded()  # the model's weights stay: a local round goes on

    def register_local_var(self, var: keras.Variable | Iterable[keras.Variable]) -> None:
        """Do not exchange the gradient of `var` (it is divided by N, if scale_local_gradients).

        With local steps its changes are not exchanged; call it before the first step.
        """
        self._dgc.strategy.check_not_begun()
        self._dgc.local |= keys_of(var, "var")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the warm-up, from 0; our callbacks do it in ``model.fit``.

        Raises:
            ConfigError: `epoch` is not a whole number.
        """
        self._dgc.distribution.set_epoch(whole_epoch(epoch))

    def clear_residuals(self) -> None:
        """Empty u and v on this rank, for a script that has replaced the weights.

        With local steps: empty `e` and outer momentum, and begin a round with the present weights. Every rank must call
        it, after all have set the same weights.
        """
        self._dgc.distribution.ownership.clear()
        self._dgc.strategy.forget()
        self._dgc.strategy.begin_anew()

    def residual_state_dict(self) -> dict[str, Any]:
        """Return the residuals and momentum of this rank: training state that other ranks do not have.

        Returns:
            A dict of numbers and arrays, copies; empty before the first step and without compression. With local steps
            also the slots of SGD, Adam and AdamW.

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
        """Return counters of this rank's exchanges since wrapping; fields as in ``dgc_horovod.torch``."""
        return self._dgc.distribution.stats()

    def __copy__(self, *args: object) -> NoReturn:
        raise UnsupportedUse("a copy would train undistributed; copy the Keras optimizer, then wrap the copy")

    __deepcopy__ = __reduce_ex__ = __copy__


class Overrides(Methods):
    """Methods over a Keras optimizer: gradients are exchanged after accumulation and unscaling, before anything else.

    Keras calls ``apply`` -> ``_clip_gradients`` (here they are exchanged) -> ``_apply_weight_decay`` ->
    ``_backend_update_step`` -> ``update_step``.
    """

    @not_converted
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> None:
        """Apply the gradients of all ranks; with local steps those of this rank, then perhaps an exchange."""
        self._dgc.apply(grads, trainable_variables, super().apply)

    def _clip_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        return self._dgc.application.clip_gradients(grads, super()._clip_gradients)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        self._dgc.application.decay(variables, super()._apply_weight_decay)

    def _backend_update_step(self, *arguments: object) -> None:
        self._dgc.application.update(partial(super()._backend_update_step, *arguments))

    def update_step(self, gradient: Gradient, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        """Step as the optimizer does; ``w -= lr * mean(s)`` if its arithmetic was done before selection."""
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
        """Build as Keras does. Accumulators of ``backward_passes_per_step`` are not saved, nor broadcast."""
        super().build(variables)
        if self._dgc.passes > 1:
            for accumulator in self._accumulated_gradients:
                self._untrack_variable(accumulator)

    def get_config(self) -> dict[str, Any]:
        """Return Keras' config of the wrapped optimizer."""
        config = super().get_config()
        return {**config, "gradient_accumulation_steps": None} if self._dgc.passes > 1 else config

    def flush(self) -> None:
        """Apply all residuals by one dense exchange: no rank has a residual afterwards.

        Momentum goes into the optimizer's slots, so that a saved model is a complete stock one. SGD:
        ``w -= lr*mean(v)``, ``velocity -= lr*mean(u)``, exact. Adam: the same for v, and the velocity is the second
        moment that all ranks share; rounding errors of small variables stay. Other optimizers, and methods without
        momentum correction: a step of the optimizer with ``mean(v)`` as gradient. With local steps the round under way
        is exchanged first. Every rank must call it, between two steps, in eager mode.

        Cost: an fp32 allreduce of v and of u.
        """
        self._dgc.strategy.before_flush()
        flush(self._dgc, super().apply)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # set by a LossScaleOptimizer on the optimizer that it wraps
            self._dgc.scaled_by_another = True
        if name in CLIPPINGS:
            check_change(self, self._dgc.distribution.settings.config, name, value)
        super().__setattr__(name, value)


class LocalOverrides(Overrides):
    """Methods over an optimizer with local steps."""

    @not_converted
    def exchange(self) -> None:
        """Exchange the changes of the weights since the last exchange; every rank calls it, between two steps.

        Afterwards the weights are the same on every rank. ``apply`` does it every ``local_steps`` steps.
        """
        self._dgc.strategy.conclude()


class AgreedScaling(Methods):
    """Methods over a LossScaleOptimizer with a distributed inner optimizer: an overflow on one rank is one on all."""

    @not_converted
    def check_finite(self, grads: Sequence[Gradient]) -> tf.Tensor:
        """Return whether every gradient of every rank is finite. One small collective."""
        return self._dgc.distribution.all_agree(super().check_finite(grads))

    def flush(self) -> None:
        """See `Overrides`."""
        self.inner_optimizer.flush()
