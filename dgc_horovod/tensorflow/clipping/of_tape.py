"""TensorFlow's clipping functions and Keras' optimizers, where they are given what a compressed tape has returned.

Such tensors carry a mark. Clipping leaves them as they are, and lets their exchange clip each rank's own gradient
instead; see `learned`. What cannot be done so is refused: an update that is clipped is a run quietly ruined.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.names import replace_everywhere
from dgc_horovod.tensorflow.clipping.learned import INSTEAD, marks, number
from dgc_horovod.tensorflow.clipping.of_optimizer import clipping_of
from dgc_horovod.tensorflow.wrapping.variables import Gradient, key_of

_log = logging.getLogger("dgc_horovod")
not_converted: Any = tf.autograph.experimental.do_not_convert


def install() -> None:
    """Let TensorFlow's clipping functions and Keras' optimizers know marks, wherever they are held; once a process."""
    for replacing in (_by_global_norm, _by_norm, _by_value):
        stock = getattr(tf, f"clip{replacing.__name__}")
        replace_everywhere(stock, not_converted(functools.wraps(stock)(replacing(stock))))
    own = BaseOptimizer._clip_gradients
    BaseOptimizer._clip_gradients = not_converted(functools.wraps(own)(_of_an_optimizer(own)))
    for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        kind.apply = not_converted(functools.wraps(kind.apply)(_checked(kind.apply)))


def _by_global_norm(stock: Any) -> Callable[..., Any]:
    def clip(t_list: Any, clip_norm: Any, use_norm: Any = None, name: str | None = None) -> Any:
        what = "tf.clip_by_global_norm"
        found = marks(t_list, what)
        if found is None:
            return stock(t_list, clip_norm, use_norm, name)
        returned, numbers = found
        _check_all(returned.count, numbers, what)
        if returned.clipping.learn("global_clipnorm", numbers, clip_norm, what):
            return list(t_list), returned.norm
        clipped, _ = stock(t_list, clip_norm, use_norm, name)
        return [_marked(*pair) for pair in zip(clipped, t_list, strict=True)], returned.norm

    return clip


def _by_norm(stock: Any) -> Callable[..., Any]:
    def clip(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> Any:
        found, what = marks([t]), "tf.clip_by_norm"
        if found is None:
            return stock(t, clip_norm, axes, name)
        if axes is not None:
            raise UnsupportedUse(f"{what} along axes of what a compressed tape has returned; {INSTEAD}")
        returned, numbers = found
        known = returned.clipping.learn("clipnorm", numbers, clip_norm, what)
        return t if known else _marked(stock(t, clip_norm, axes, name), t)

    return clip


def _by_value(stock: Any) -> Callable[..., Any]:
    def clip(t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None) -> Any:
        found, what = marks([t]), "tf.clip_by_value"
        if found is None:
            return stock(t, clip_value_min, clip_value_max, name)
        low, high = number(clip_value_min), number(clip_value_max)
        if low is None or high is None or low != -high:
            raise UnsupportedUse(f"{what} from {low} to {high} of what a compressed tape has returned; {INSTEAD}")
        returned, numbers = found
        known = returned.clipping.learn("clipvalue", numbers, high, what)
        return t if known else _marked(stock(t, low, high, name), t)

    return clip


def _marked(clipped: Any, t: Any) -> Any:
    """`clipped`, of an eager loop's first step, known as what `t` is known as."""
    if clipped is not None:
        clipped._dgc_returned = t._dgc_returned
    return clipped


def _of_an_optimizer(stock: Any) -> Callable[..., Any]:
    def clip(self: Any, grads: Any) -> Any:
        own, found = clipping_of(self), marks(grads, "the clipping of an optimizer")
        if own is None or found is None:
            return stock(self, grads)
        (kind, limit), (returned, numbers) = own, found
        if kind == "global_clipnorm":
            _check_all(returned.count, numbers, kind)
        known = returned.clipping.learn(kind, numbers, limit, f"{kind} of the optimizer")
        return grads if known else stock(self, grads)

    return clip


def _check_all(count: int, numbers: Sequence[int], what: str) -> None:
    if len(set(numbers)) < count:
        raise UnsupportedUse(f"{what} of some of the gradients that a compressed tape has returned; {INSTEAD}")


pending: set[Any] = set()  # keys of variables of which a compressed tape has returned something that is not applied yet
_inside = [False]  # whether an optimizer applies for another one


def _checked(stock: Any) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads, given = list(grads), None if trainable_variables is None else list(trainable_variables)
        if _inside[0]:
            return stock(self, grads, given)
        _check(self, grads, {key_of(variable) for variable in given or self._trainable_variables})
        _inside[0] = True
        try:
            return stock(self, grads, given)
        finally:
            _inside[0] = False

    return apply


def _check(optimizer: Any, grads: Sequence[Gradient], keys: set[Any]) -> None:
    """Refuse what would be exchanged twice, or clipped where nobody can learn it."""
    marked = any(hasattr(gradient, "_dgc_returned") for gradient in grads)
    changed = not marked and bool(keys & pending)
    pending.difference_update(keys)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(inner, "_dgc"):
        if marked:
            raise UnsupportedUse(
                "gradients of a DistributedGradientTape are given to a DistributedOptimizer, which would exchange and "
                "compress them a second time; use one of the two"
            )
        return
    if marked and inner is not optimizer:
        raise UnsupportedUse(
            "gradients that a compressed tape has returned are given to a LossScaleOptimizer: what waits is in the "
            "scale of its step, and the scale changes. Use DistributedOptimizer(LossScaleOptimizer(optimizer)) in "
            "place of the tape, or mixed_bfloat16, which needs no scale"
        )
    changes = inner.gradient_accumulation_steps or inner.loss_scale_factor
    own = clipping_of(inner)
    if own is not None and (changed or (marked and changes)):
        raise UnsupportedUse(
            f"{own[0]}={own[1]:g} of the optimizer would clip what a compressed tape has returned, after it was "
            "scaled, accumulated or changed otherwise: an update in bursts, not a gradient. Use DistributedOptimizer "
            f"in place of the tape; or take {own[0]} away, and {INSTEAD}"
        )
    if changed and hvd.rank() == 0:
        _say_once_that_it_is_changed()


@functools.cache
def _say_once_that_it_is_changed() -> None:
    _log.warning(
        "dgc_horovod: the script changes what a compressed tape has returned before it is applied. That is an update, "
        "in bursts, and no gradient: what a clipping of its own cuts is lost. To clip, %s",
        INSTEAD,
    )
