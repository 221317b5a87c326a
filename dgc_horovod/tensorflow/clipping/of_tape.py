"""TensorFlow's clipping functions and Keras' optimizers on the gradients of a compressed tape.

These are an update: it comes in bursts, of several times the norm of a gradient, and the part that a limit cuts off is
lost. So they carry a mark. Clipping them is an error; with ``clip_norm``, which clips each rank's gradient, it has no
effect.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.optimizers.base_optimizer import BaseOptimizer

from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.names import replace_everywhere
from dgc_horovod.tensorflow.clipping.of_optimizer import clipping_of
from dgc_horovod.tensorflow.distribution import of_tapes
from dgc_horovod.tensorflow.gradients.transport import Collectives
from dgc_horovod.tensorflow.session.overrides import not_converted
from dgc_horovod.tensorflow.session.session import session_of
from dgc_horovod.tensorflow.wrapping.settings import warn_once
from dgc_horovod.tensorflow.wrapping.variables import Gradient, Key, key_of

INSTEAD = "pass clip_norm=... to the compression (dgcrun: --dgc-clip-norm), which clips each rank's gradient"


def install() -> None:
    """Replace TensorFlow's clipping functions and Keras' methods by ones that recognize marks; once a process."""
    for stock in (tf.clip_by_global_norm, tf.clip_by_norm, tf.clip_by_value):
        replace_everywhere(stock, not_converted(functools.wraps(stock)(_of_a_script(stock))))
    own = BaseOptimizer._clip_gradients
    BaseOptimizer._clip_gradients = not_converted(functools.wraps(own)(_of_an_optimizer(own)))
    for kind in (BaseOptimizer, keras.optimizers.LossScaleOptimizer):
        kind.apply = not_converted(functools.wraps(kind.apply)(_checked(kind.apply)))


class Returned:
    """The gradients that a compressed tape has returned in one call.

    Args:
        clip_norm: limit of the compression, which clips each rank's gradient; None: there is none.
        own: gradients of this rank.
        combined: combined tensors; each carries a mark from now on.
        collectives: transport of its exchange.
    """

    def __init__(
        self, clip_norm: float | None, own: Sequence[Gradient], combined: Sequence[Any], collectives: Collectives
    ) -> None:
        self.clip_norm, self._own, self._collectives = clip_norm, list(own), collectives
        self._first, self.count = combined[0], len(combined)
        self._norm: tf.Tensor | None = None
        for tensor in combined:
            tensor._dgc_returned = self

    @property
    def norm(self) -> tf.Tensor:
        """Norm of the gradients before they were clipped: root mean square of the ranks' norms, equal on every rank."""
        if self._norm is None:
            own = [tf.cast(tf.convert_to_tensor(gradient), tf.float32) for gradient in self._own]
            # the clock is free once the exchange has ended
            total = self._collectives.sum_in_time(tf.square(tf.linalg.global_norm(own)), "norm", self._first)
            self._norm = tf.sqrt(total / self._collectives.size(tf.float32))
        return self._norm


def _left_out(tensors: Iterable[Any], what: str, of_all: bool) -> Returned | None:
    """Return the call of a compressed tape that has returned `tensors`, which must not be clipped; None: there is none.

    Args:
        what: name of the clipping, for messages.
        of_all: whether it limits the norm of all gradients together.

    Raises:
        UnsupportedUse: there is no ``clip_norm``; or some tensors are of another tape, or of none.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    found = {getattr(tensor, "_dgc_returned", None) for tensor in given}
    returned = next(filter(None, found), None)
    if returned is None:
        return None
    if returned.clip_norm is None:
        raise UnsupportedUse(
            f"{what} is applied to gradients of a compressed tape. They are an update that comes in bursts, and the "
            f"part that clipping cuts off is lost. To clip, {INSTEAD}; {what} has no effect then"
        )
    if len(found) > 1 or (of_all and len(given) < returned.count):
        raise UnsupportedUse(
            f"{what} is applied to only some gradients of a compressed tape, or to others with them (local ones, or "
            f"another tape's). clip_norm={returned.clip_norm:g} of the compression clips those of the tape; clip the "
            "others separately"
        )
    warn_once(f"clip_norm={returned.clip_norm:g} of the compression is used; {what} has no effect")
    return returned


def _of_a_script(stock: Callable[..., Any]) -> Callable[..., Any]:
    first, what = next(iter(inspect.signature(stock).parameters)), f"tf.{stock.__name__}"
    of_all = first == "t_list"

    def clip(*args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get(first)
        returned = _left_out(given if of_all else [given], what, of_all)
        if returned is None:
            return stock(*args, **kwargs)
        return (list(given), returned.norm) if of_all else given

    return clip


def _of_an_optimizer(stock: Callable[..., Any]) -> Callable[..., Any]:
    def clip(self: BaseOptimizer, grads: Sequence[Gradient]) -> Any:
        kind, _ = clipping_of(self) or ("", 0.0)
        if kind and _left_out(grads, f"{kind} of the optimizer", kind == "global_clipnorm"):
            return grads
        return stock(self, grads)

    return clip


_inside = [False]  # whether an optimizer applies for another one


def _checked(stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: BaseOptimizer, grads: Iterable[Gradient], trainable_variables: Iterable[Any] | None = None) -> Any:
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


def _check(optimizer: BaseOptimizer, grads: Sequence[Gradient], keys: set[Key]) -> None:
    """Raise UnsupportedUse for gradients that would be exchanged twice, or clipped after their mark is lost."""
    marked = any(hasattr(gradient, "_dgc_returned") for gradient in grads)
    changed = not marked and any(keys & each.unapplied for each in of_tapes.values())
    for each in of_tapes.values():
        each.unapplied -= keys
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if session_of(inner) is not None:
        if marked:
            raise UnsupportedUse(
                "gradients of a DistributedGradientTape are given to a DistributedOptimizer, which would exchange and "
                "compress them a second time; use one of the two"
            )
        return
    if marked and inner is not optimizer:
        raise UnsupportedUse(
            "gradients of a compressed tape are given to a LossScaleOptimizer: the residual has the loss scale of "
            "earlier steps, and the scale changes. Use DistributedOptimizer(LossScaleOptimizer(optimizer)) in place of "
            "the tape, or mixed_bfloat16, which needs no scale"
        )
    changes = inner.gradient_accumulation_steps or inner.loss_scale_factor
    own = clipping_of(inner)
    if own is not None and (changed or (marked and changes)):
        raise UnsupportedUse(
            f"{own[0]}={own[1]:g} of the optimizer would clip gradients of a compressed tape, after they were scaled, "
            "accumulated or changed: they are an update that comes in bursts. Use DistributedOptimizer in place of the "
            f"tape; or remove {own[0]}, and {INSTEAD}"
        )
    if changed:
        warn_once(
            "the script changes gradients of a compressed tape before they are applied. They are an update that comes "
            f"in bursts: if the script clips them, the part that is cut off is lost. To clip, {INSTEAD}"
        )
