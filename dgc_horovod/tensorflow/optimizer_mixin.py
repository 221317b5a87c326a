"""The methods that make a Keras optimizer distributed; `optimizer` puts them over the user's class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.state.residual_state import ResidualState
from dgc_horovod.tensorflow.broadcast import shared_variables
from dgc_horovod.tensorflow.clipping.of_optimizer import KINDS, check_change, clipped
from dgc_horovod.tensorflow.distribution import Distribution, VariableSet
from dgc_horovod.tensorflow.flush import flush
from dgc_horovod.tensorflow.wrapping.variables import Gradient, Key, is_frozen, key_of, keys_of, native, scaled

OWN_APPLY = (
    "{name} steps in an apply() of its own, in which nothing is exchanged: the ranks would train apart. Use a "
    "DistributedGradientTape, and give what it returns to {name}"
)
# AutoGraph would rewrite these methods when a tf.function of the user calls them.
not_converted: Any = tf.autograph.experimental.do_not_convert
UsersClass: Any = object  # over which the methods are put


class Application:
    """One call of ``apply``, while it is traced or run."""

    def __init__(self, variables: VariableSet, known: Sequence[Any]) -> None:
        self.variables, self.known = variables, known
        self.exchanged = False  # whether Keras' ``apply`` has come to the exchange
        self.finite: tf.Tensor | None = None
        self.dense: tf.Tensor | None = None
        self.split = False  # whether compressed variables are stepped by what comes back alone
        self.decayed: Sequence[Any] = ()


class DistributedMethods(UsersClass):
    """Over a Keras optimizer: gradients are exchanged after accumulation and unscaling, before anything else.

    Keras calls ``apply`` -> ``_clip_gradients`` (here they are exchanged) -> ``_apply_weight_decay`` ->
    ``_backend_update_step`` -> ``update_step``.
    """

    _dgc: Distribution
    _dgc_local: set[Key]  # variables that are left to each rank
    _dgc_applying: Application | None = None
    _dgc_passes = 1  # Horovod's backward_passes_per_step
    _dgc_averaged = True  # over the passes, or summed
    _dgc_clips = True  # whether what is applied is a gradient of one step

    @not_converted
    def apply(self, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> None:
        """As Keras', with the gradients of all ranks."""
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        known = self._trainable_variables if given is None else given
        if not self._dgc.takes_part or len(known) != len(grads) or not known:
            return super().apply(grads, given)
        self._dgc_check(known)
        here = [i for i, variable in enumerate(known) if grads[i] is not None or not is_frozen(variable)]
        if 0 < len(here) < len(known):  # what Keras would leave out is not exchanged either
            known, grads = [known[i] for i in here], [grads[i] for i in here]
            given = known
        variables = self._dgc.variable_set(known, grads, self._dgc_local)
        application = Application(variables, known)
        with _during(self, application):
            super().apply(variables.completed(grads), given)
        if not (application.exchanged or self.gradient_accumulation_steps):
            raise UnsupportedUse(OWN_APPLY.format(name=type(self).__name__))

    def _clip_gradients(self, grads: Sequence[Gradient]) -> list[Gradient]:
        application = self._dgc_applying
        if application is None:
            return super()._clip_gradients(grads) if self._dgc_clips else list(grads)
        application.exchanged = True
        settings, variables = self._dgc.settings, application.variables
        compresses = settings.config is not None
        automatic = settings.config is not None and settings.config.automatic
        # Keras has left out those without a gradient, and averaged over the passes
        passes = 1 if self._dgc_averaged else self._dgc_passes
        gradients = {i: scaled(g, passes) for i, g in zip(variables.given, grads, strict=True)}
        for i in gradients:
            if variables.local[i]:
                gradients[i] = scaled(gradients[i], settings.local_scale)
            if not automatic or variables.local[i]:  # else it depends on what the step takes, see `AutomaticExchange`
                gradients[i] = clipped(gradients[i], self, settings, variables.local[i])
        if variables.exchange is not None:
            active = [gradients[i] for i in variables.active]
            weights = [native(application.known[i]) for i in variables.active]
            everything = [*weights, *self._dgc_shared(variables)]
            rate = self._get_current_learning_rate()
            exchanged = variables.exchange(active, self.iterations, rate, weights, everything)
            application.finite, application.dense = exchanged.finite, exchanged.dense
            gradients.update(zip(variables.active, exchanged.gradients, strict=True))
        results = list(gradients.values())
        return results if compresses else super()._clip_gradients(self._dgc_limited(results))

    def _dgc_limited(self, gradients: list[Gradient]) -> list[Gradient]:
        """The averages of all ranks within the ``clip_norm`` of a choice that has ended in no compression."""
        limit = self._dgc.settings.clip_norm
        return gradients if limit is None else list(tf.clip_by_global_norm(gradients, limit)[0])

    def _dgc_shared(self, variables: VariableSet) -> list[Any]:
        """The optimizer's variables that are the same on every rank; with local weights, only its iterations."""
        shared = list(map(native, shared_variables(self)))
        if not any(variables.local):
            return shared
        return [native(self.iterations)]

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        if self._dgc_applying is None or self._dgc_applying.finite is None:
            super()._apply_weight_decay(variables)
        else:
            self._dgc_applying.decayed = variables  # under the condition of `_backend_update_step`

    def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        application = self._dgc_applying
        above: Any = super()
        if application is None or application.finite is None:
            return above._backend_update_step(grads, trainable_variables, learning_rate)

        def update(split: bool) -> bool:
            application.split = split
            above._apply_weight_decay(application.decayed)
            above._backend_update_step(grads, trainable_variables, learning_rate)
            return True

        def either() -> Any:
            if application.dense is None:
                return update(self._dgc.update.is_split)
            return tf.cond(application.dense, lambda: update(False), lambda: update(True))

        tf.cond(application.finite, either, lambda: False)  # on every rank, or on none

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """As the optimizer's own; ``w -= lr * mean(s)`` where its arithmetic has been done before selection."""
        application = self._dgc_applying
        if application is None or not application.split or key_of(variable) not in application.variables.compressed:
            return super().update_step(gradient, variable, learning_rate)
        target = native(variable)
        if target.dtype == gradient.dtype:
            rate = keras.ops.cast(learning_rate, target.dtype)
            tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=rate, delta=gradient)
        else:
            change = gradient * keras.ops.cast(learning_rate, gradient.dtype)
            target.assign_sub(tf.cast(change, target.dtype))

    # -- what Keras does around

    def build(self, variables: Sequence[Any]) -> None:
        """As Keras'. Accumulators of ``backward_passes_per_step`` are each rank's own: not saved, not broadcast."""
        super().build(variables)
        if self._dgc_passes > 1:
            for accumulator in self._accumulated_gradients:
                self._untrack_variable(accumulator)

    def get_config(self) -> dict[str, Any]:
        """As Keras', of the wrapped optimizer."""
        config = super().get_config()
        return {**config, "gradient_accumulation_steps": None} if self._dgc_passes > 1 else config

    def save_own_variables(self, store: Any) -> None:
        """As Keras'; the slots that are empty because the engine has their part get what this rank has."""
        _save(self, self.variables, store)

    def load_own_variables(self, store: Any) -> None:
        """As Keras'; u and v belong to the weights before and start from zero."""
        super().load_own_variables(store)
        self._dgc.clock.reloaded()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """As Keras'; u and v belong to the weights before and start from zero."""
        super().set_weights(weights)
        self._dgc.clock.reloaded()  # of the model's weights it says nothing: a local round goes on

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # LossScaleOptimizer does so to the one that it wraps
            self.__dict__["_dgc_scaled_by_another"] = True
        if name in KINDS:
            check_change(self, self._dgc.settings.config, name, value)
        super().__setattr__(name, value)

    def _dgc_check(self, variables: Sequence[Any]) -> None:
        if self.__dict__.get("_dgc_scaled_by_another"):
            raise UnsupportedUse(
                "a LossScaleOptimizer was put around this DistributedOptimizer (or its loss_scale_factor was taken "
                "away): a rank whose gradient overflows would leave the others waiting. Put it inside: "
                "DistributedOptimizer(LossScaleOptimizer(optimizer)). A MultiOptimizer does so too: use a "
                "DistributedGradientTape with it"
            )
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise UnsupportedUse(
                    f"{variable.path!r} is overwritten by its gradient (float8 training), which cannot be combined "
                    "over ranks; use another dtype policy"
                )

    def __copy__(self) -> Any:
        raise UnsupportedUse("a copy would train undistributed; copy the Keras optimizer, then wrap the copy")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return self.__copy__()

    # -- ours

    def register_local_var(self, var: Any) -> None:
        """Leave `var` to each rank: its gradient is not exchanged (and divided by N, if scale_local_gradients)."""
        self._dgc_local |= keys_of(var, "var")

    def set_epoch(self, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is; our callbacks do it in ``model.fit``."""
        self._dgc.set_epoch(epoch)

    def clear_residuals(self) -> None:
        """Empty u and v on this rank: for a script that has set the weights to others."""
        self._dgc.clear()

    def residual_state_dict(self) -> dict[str, Any]:
        """What this rank has kept of gradients that the model has not had yet: training state, of this rank alone.

        Returns:
            A dict of numbers and arrays, copies; empty before the first step and without compression.

        Raises:
            UnsupportedUse: there are several sets of variables.
        """
        self._dgc.clock.look(int(self.iterations))
        state = self._dgc.residuals()
        return {} if state is None else state.to_dict()

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on, bit for bit, from ``residual_state_dict()`` of this rank; after weights and optimizer were loaded.

        Raises:
            CheckpointError: it is of another rank, another number of ranks or another model.
        """
        if state_dict != {}:
            self._dgc.resume(ResidualState.from_dict(state_dict), int(self.iterations))

    def flush(self) -> None:
        """Apply everything that the ranks have kept, by one dense exchange: no residual is left on any rank.

        Momentum goes into the optimizer's slots, so that a saved model is a stock one of which nothing is missing. SGD:
        ``w -= lr*mean(v)``, ``velocity -= lr*mean(u)``, exact. Adam: the same for v, and the velocity is the second
        moment that all ranks share; what coding has left of small variables stays. Other optimizers, and methods
        without momentum correction: a step of theirs with ``mean(v)`` as gradient. Every rank must call it, between two
        steps, in eager mode.

        Cost: an fp32 allreduce of v and of u.
        """
        flush(self, self._dgc)

    def _dgc_finish_round(self) -> None:
        """End what spans several steps: nothing does here."""

    def _dgc_outer(self) -> list[Any]:
        """Variables that belong to a checkpoint and not to Keras' optimizer; it is built. None here."""
        return []

    def _dgc_weights_loaded(self) -> None:
        """A checkpoint of ours was loaded."""

    def _dgc_apply_as_stock(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """A step of the user's optimizer, without exchange."""
        super().apply(list(gradients), list(variables))

    def _dgc_apply_whole(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """The same with gradients of many steps: nothing that is meant for one clips or scales them."""
        object.__setattr__(self, "_dgc_clips", False)
        try:
            self._dgc_apply_as_stock([scaled(g, self.loss_scale_factor or 1) for g in gradients], variables)
        finally:
            object.__setattr__(self, "_dgc_clips", True)

    def compression_stats(self) -> dict[str, Any]:
        """What this rank has exchanged since it was wrapped: fields as in ``dgc_horovod.torch``."""
        return self._dgc.stats()


def _save(optimizer: Any, variables: Sequence[Any], store: Any) -> None:
    optimizer._dgc.clock.look(int(optimizer.iterations))
    rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    ours = optimizer._dgc.for_slots(rate)
    for i, variable in enumerate(variables):
        value = ours.get(id(native(variable)))
        store[str(i)] = variable.numpy() if value is None else value


@contextmanager
def _during(optimizer: Any, application: Application) -> Iterator[None]:
    object.__setattr__(optimizer, "_dgc_applying", application)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_dgc_applying", None)


class AgreedScaling(UsersClass):
    """Over a LossScaleOptimizer whose inner optimizer is distributed: an overflow on one rank is one on all."""

    @not_converted
    def check_finite(self, grads: Sequence[Gradient]) -> tf.Tensor:
        """Whether every gradient of every rank is finite. One small collective."""
        return self._dgc.all_agree(super().check_finite(grads))

    @property
    def _dgc(self) -> Distribution:
        return self.inner_optimizer._dgc

    def save_own_variables(self, store: Any) -> None:
        """See `DistributedMethods`."""
        _save(self, self.variables, store)

    def load_own_variables(self, store: Any) -> None:
        """See `DistributedMethods`."""
        super().load_own_variables(store)
        self._dgc.clock.reloaded()

    def set_weights(self, weights: Sequence[Any]) -> None:
        """See `DistributedMethods`."""
        super().set_weights(weights)
        self._dgc.clock.reloaded()

    def register_local_var(self, var: Any) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.register_local_var(var)

    def set_epoch(self, epoch: int) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.set_epoch(epoch)

    def clear_residuals(self) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.clear_residuals()

    def residual_state_dict(self) -> dict[str, Any]:
        """See `DistributedMethods`."""
        return self.inner_optimizer.residual_state_dict()

    def load_residual_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.load_residual_state_dict(state_dict)

    def flush(self) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.flush()

    def compression_stats(self) -> dict[str, Any]:
        """See `DistributedMethods`."""
        return self.inner_optimizer.compression_stats()
