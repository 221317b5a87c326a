"""The methods that make a Keras optimizer distributed; `optimizer` puts them over the user's class."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.exchange import clip_limit
from dgc_horovod.tensorflow.distribution import Distribution, Member
from dgc_horovod.tensorflow.variables import Gradient, key_of, native

# AutoGraph would rewrite these methods when a tf.function of the user calls them.
not_converted: Any = tf.autograph.experimental.do_not_convert
_Above: Any = object  # the user's class, when the methods are put over it


class Step:
    """One call of ``apply``, while it is traced or run."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.plain = {key_of(member.sources[i]) for i in member.compressed}
        self.finite: tf.Tensor | None = None
        self.decayed: Sequence[Any] = ()


class DistributedMethods(_Above):
    """Over a Keras optimizer: gradients are exchanged after accumulation and unscaling, before anything else.

    Keras calls ``apply`` -> ``_clip_gradients`` (here they are exchanged) -> ``_apply_weight_decay`` ->
    ``_backend_update_step`` -> ``update_step``.
    """

    _dgc: Distribution
    _dgc_local: set[Any]  # keys of the variables that are left to each rank
    _dgc_step: Step | None = None
    _dgc_passes = 1  # Horovod's backward_passes_per_step, if the passes are to be summed

    @not_converted
    def apply(self: Any, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """As Keras', with the gradients of all ranks."""
        known = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self._dgc.takes_part or len(known) != len(grads) or not known:
            return super().apply(grads, trainable_variables)
        self._dgc_check_scaling()
        member = self._dgc.member(known, grads, self._dgc_local)
        with _during(self, Step(member)):
            super().apply(member.completed(grads), trainable_variables)

    def _clip_gradients(self: Any, grads: Sequence[Gradient]) -> list[Gradient]:
        step = self._dgc_step
        if step is None:
            return super()._clip_gradients(grads)
        member, grads = step.member, list(grads)
        given = [i for i, kind in enumerate(member.kinds) if kind != "none"]  # Keras has left the others out
        place = {i: j for j, i in enumerate(given)}
        if self._dgc.settings.scale_local_gradients:
            workers = self._dgc.settings.process_set.size()
            for i in set(given) - set(member.active):
                grads[place[i]] = grads[place[i]] / workers
        compresses = self._dgc.settings.config is not None
        if member.exchange is not None:
            mine = [grads[place[i]] for i in member.active]
            if self._dgc_passes > 1:  # Keras has averaged them
                mine = [gradient * self._dgc_passes for gradient in mine]
            if compresses:
                mine = self._dgc_clip_locally(mine)
            exchanged = member.exchange(mine, self.iterations, self._get_current_learning_rate())
            step.finite = exchanged.finite
            for i, gradient in zip(member.active, exchanged.gradients, strict=True):
                grads[place[i]] = gradient
        return grads if compresses else super()._clip_gradients(grads)

    def _dgc_clip_locally(self: Any, grads: list[Any]) -> list[Any]:
        """Keras' clipping by variable, before compression and not after it: what comes back arrives in bursts."""
        settings = self._dgc.settings
        workers = settings.process_set.size()
        if self.clipnorm:
            limit = clip_limit(self.clipnorm, workers, settings.averages)
            return [tf.clip_by_norm(tf.convert_to_tensor(gradient), limit) for gradient in grads]
        if self.clipvalue:
            limit = clip_limit(self.clipvalue, workers, settings.averages)
            return [tf.clip_by_value(tf.convert_to_tensor(gradient), -limit, limit) for gradient in grads]
        return grads

    def _apply_weight_decay(self: Any, variables: Sequence[Any]) -> None:
        if self._dgc_step is None or self._dgc_step.finite is None:
            super()._apply_weight_decay(variables)
        else:
            self._dgc_step.decayed = variables  # under the condition of `_backend_update_step`

    def _backend_update_step(self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        step = self._dgc_step
        above: Any = super()
        if step is None or step.finite is None:
            return above._backend_update_step(grads, trainable_variables, learning_rate)

        def update() -> bool:
            above._apply_weight_decay(step.decayed)
            above._backend_update_step(grads, trainable_variables, learning_rate)
            return True

        tf.cond(step.finite, update, lambda: False)  # on every rank, or on none

    def update_step(self: Any, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """As the optimizer's own; ``w -= lr * mean(s)`` where its arithmetic has been done before selection."""
        step = self._dgc_step
        if step is None or not self._dgc.update.is_split or key_of(variable) not in step.plain:
            return super().update_step(gradient, variable, learning_rate)
        target = native(variable)
        rate, gradient = keras.ops.cast(learning_rate, target.dtype), tf.cast(gradient, target.dtype)
        tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=rate, delta=gradient)

    # -- loss scaling

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if name == "loss_scale_factor":  # LossScaleOptimizer sets it on the optimizer that it wraps
            self.__dict__["_dgc_scaled_by_another"] = value is None
        super().__setattr__(name, value)

    def _dgc_check_scaling(self: Any) -> None:
        if self.__dict__.get("_dgc_scaled_by_another"):
            raise UnsupportedUse(
                "a LossScaleOptimizer was put around this DistributedOptimizer: a rank whose gradient overflows would "
                "leave the others waiting. Put it inside: DistributedOptimizer(LossScaleOptimizer(optimizer))"
            )

    # -- ours

    def register_local_var(self: Any, var: Any) -> None:
        """Leave `var` to each rank: its gradient is not exchanged (and divided by N, if scale_local_gradients)."""
        self._dgc_local.add(key_of(var))

    def set_epoch(self: Any, epoch: int) -> None:
        """Tell the warm-up which epoch (from 0) it is; our callbacks do it in ``model.fit``."""
        self._dgc.set_epoch(epoch)

    def clear_residuals(self: Any) -> None:
        """Empty u and v on this rank: for a script that has set the weights to others."""
        self._dgc.clear()

    def compression_stats(self: Any) -> dict[str, int]:
        """What this rank has exchanged since it was wrapped: fields as in ``dgc_horovod.torch``."""
        return self._dgc.stats()


@contextmanager
def _during(optimizer: Any, step: Step) -> Any:
    object.__setattr__(optimizer, "_dgc_step", step)
    try:
        yield
    finally:
        object.__setattr__(optimizer, "_dgc_step", None)


class AgreedScaling(_Above):
    """Over a LossScaleOptimizer whose inner optimizer is distributed: an overflow on one rank is one on all."""

    @not_converted
    def check_finite(self: Any, grads: Sequence[Gradient]) -> tf.Tensor:
        """Whether every gradient of every rank is finite. One small collective."""
        return self.inner_optimizer._dgc.all_agree(super().check_finite(grads))

    def register_local_var(self: Any, var: Any) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.register_local_var(var)

    def set_epoch(self: Any, epoch: int) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.set_epoch(epoch)

    def clear_residuals(self: Any) -> None:
        """See `DistributedMethods`."""
        self.inner_optimizer.clear_residuals()

    def compression_stats(self: Any) -> dict[str, int]:
        """See `DistributedMethods`."""
        return self.inner_optimizer.compression_stats()
