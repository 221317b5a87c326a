"""A Keras optimizer's arithmetic (`dgc_horovod.arithmetic`) in its slots and its variables.

With plain error feedback the user's optimizer steps with the exchanged update as its gradient. If its arithmetic is
split, only the plain step ``w -= lr * mean(s)`` remains. Keras' weight decay is decoupled for every optimizer, and
stays as it is.

A checkpoint's slots (velocity, moments) are taken over by the engine at the first step after loading, and emptied. When
Keras saves, the file gets the engine's values. The reverse is `hand_back`, inside a graph or out of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dgc_horovod.arithmetic import SGD, Adam, Arithmetic, Change, Left, Options, choose
from dgc_horovod.config import DGCConfig
from dgc_horovod.core.optimizer_exchange import OptimizerExchange
from dgc_horovod.errors import UnsupportedUse
from dgc_horovod.kernels.contract import Accumulation
from dgc_horovod.state.residual_state import FIRST, MOMENTUM, RESIDUAL, SECOND, Arrays
from dgc_horovod.tensorflow.wrapping.variables import Key, native

STOCK: dict[type[keras.optimizers.Optimizer], Arithmetic] = {keras.optimizers.SGD: SGD(), keras.optimizers.Adam: Adam()}
# attributes of an optimizer, lists, by part
SLOTS = {MOMENTUM: "momentums", FIRST: "_momentums", SECOND: "_velocities"}


def update_of(
    optimizer: keras.optimizers.Optimizer, user_class: type[keras.optimizers.Optimizer], config: DGCConfig | None
) -> Update:
    """Return the update of `optimizer`; a subclass that overrides ``update_step`` has known slots, not arithmetic.

    Args:
        optimizer: wrapped Keras optimizer.
        user_class: class of the user's optimizer.
        config: compression settings; None: nothing is compressed.

    Raises:
        UnsupportedUse: Adafactor; Adam's amsgrad under momentum correction.
    """
    local = config is not None and config.exchanges_weights
    bases = [base for base in STOCK if (issubclass if local else _steps_as)(user_class, base)]
    stock = STOCK[bases[0]] if bases else Arithmetic()
    unknown = "" if local or stock.is_split else user_class.__name__
    if config is None:
        return Update(Arithmetic(), optimizer, unknown=unknown)
    if _steps_as(user_class, keras.optimizers.Adafactor) and not (local or config.sends_all):
        raise UnsupportedUse(
            f"{unknown} of Keras divides by its statistics of the gradient's rows and columns: where compression sends "
            "nothing of a row and a column, weights become NaN. Use Adam or AdamW; or local steps, "
            "Compression.local(...), which give the optimizer plain gradients; or Compression.none"
        )
    arithmetic, notices = choose(stock, user_class, map(options_of, [optimizer]), config)
    return Update(arithmetic, optimizer, notices, unknown)


def _steps_as(user_class: type[keras.optimizers.Optimizer], base: type[keras.optimizers.Optimizer]) -> bool:
    return issubclass(user_class, base) and user_class.update_step is base.update_step


def options_of(optimizer: keras.optimizers.Optimizer) -> Options:
    """Return the options of an optimizer of known arithmetic."""
    if isinstance(optimizer, keras.optimizers.SGD):
        return Options(momentum=float(optimizer.momentum), nesterov=bool(optimizer.nesterov))
    b1, b2, eps = map(float, (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon))
    return Options(b1=b1, b2=b2, eps=eps, amsgrad=bool(optimizer.amsgrad))


class Update:
    """The application of exchanged updates by an optimizer.

    Args:
        arithmetic: arithmetic of the exchange.
        optimizer: wrapped Keras optimizer; None: the gradients go back to a tape's script.
        notices: texts for the user, each logged once.
        unknown: name of an optimizer of unknown arithmetic; "" for others.

    Attributes:
        is_tapes: whether there is no optimizer.
    """

    optimizer: keras.optimizers.Optimizer

    def __init__(
        self,
        arithmetic: Arithmetic,
        optimizer: keras.optimizers.Optimizer | None = None,
        notices: Collection[str] = (),
        unknown: str = "",
    ) -> None:
        self.arithmetic, self.notices, self.unknown = arithmetic, list(notices), unknown
        self.is_tapes, self.optimizer = optimizer is None, optimizer

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of a compressed variable's state in the engine, which are handed back."""
        return tuple(part for part in self.arithmetic.parts if part != MOMENTUM or self._options.momentum)

    @property
    def _options(self) -> Options:
        return options_of(self.optimizer) if self.arithmetic.is_split else Options()

    def _slots(self, key: Key, parts: Collection[str]) -> dict[str, tf.Variable]:
        """Return the optimizer's slots of the variable `key`, by part; none for SGD without momentum."""
        lists = {part: getattr(self.optimizer, SLOTS[part]) for part in parts}
        index = self.optimizer._trainable_variables_indices if parts else {}
        return {part: native(variables[index[key[0]]]) for part, variables in lists.items() if variables}

    def entering(self, buckets: OptimizerExchange, rate: float) -> dict[str, Accumulation]:
        """Return, by name, the way in which gradients of compressed variables enter the residual in this step.

        Args:
            buckets: exchange of the optimizer.
            rate: learning rate of this step.
        """
        options = self._options._replace(rate=rate)  # made once for all of them
        return {name: self.arithmetic.accumulation(options, buckets, name) for name in buckets.compressed}

    # -- the optimizer's slots

    def slots(self, key: Key) -> list[tf.Variable]:
        """Return the optimizer's slots of the variable `key` that the engine replaces."""
        return list(self._slots(key, self.arithmetic.slots).values())

    def take_over(
        self, buckets: OptimizerExchange, name: str, slots: list[np.ndarray], rate: float, iterations: int
    ) -> None:
        """Move the values of `slots` into `buckets`; the caller empties the slots.

        Args:
            buckets: exchange of the optimizer.
            name: name of the variable there.
            slots: values of the optimizer's variables that `slots` names, whole and flat, float32.
            rate: learning rate; for a sum over ranks, times their number.
            iterations: number of steps that the optimizer has made, >= 0.
        """
        if buckets.second[name].known or not slots[-1].any():
            return
        share = 1 if buckets.averages else buckets.workers  # each rank has its part of a sum
        owed: np.ndarray = slots[0] * np.float32(self.arithmetic.owes(self._options) / share)
        if MOMENTUM in self.arithmetic.slots:  # Keras' velocity is -lr times the sum of past gradients
            owed = slots[0] / np.float32(-rate) if rate else np.zeros_like(slots[0])
        taken = dict(zip(self.arithmetic.slots, [owed, *slots[1:]], strict=True))
        self.arithmetic.take_over(buckets, name, taken, self._options, max(1, iterations))

    def for_slots(self, buckets: OptimizerExchange, name: str, rate: float) -> list[np.ndarray]:
        """Return the engine's state as values of the optimizer's slots, for a file; [] if the slots have it."""
        found = self.arithmetic.give_back(buckets, name, self._options, int(self.optimizer.iterations))
        return [np.float32(-rate) * x if part == MOMENTUM else x for part, x in found.items()]

    def own(self, key: Key) -> Arrays:
        """Return the slots of the variable `key` that are this rank's own, for its record."""
        slots = self._slots(key, self.arithmetic.own)
        own = {part: slot.numpy().astype(np.float32).reshape(-1) for part, slot in slots.items()}
        return own if all(np.isfinite(x).all() for x in own.values()) else {}  # files refuse values that are not finite

    def take_own(self, key: Key, arrays: Arrays) -> None:
        """Restore the slots in `arrays`."""
        with tf.init_scope():  # the first step may be under construction
            for part, slot in self._slots(key, self.arithmetic.own).items():
                if part in arrays:
                    slot.assign(tf.cast(arrays[part].reshape(slot.shape), slot.dtype))

    # -- nothing left behind

    def hand_back(
        self, key: Key, variable: tf.Variable, left: Left, rate: tf.Tensor | float, compressed: bool, ends: bool = False
    ) -> Any:
        """Apply the combined state of all ranks for a variable, before a step of the user's own optimizer.

        Args:
            key, variable: key of the variable, and the tf.Variable.
            left: combined state of it, in its shape, by part: arrays or tensors.
            rate: learning rate, a number or a scalar tensor.
            compressed: whether it is on the sparse path.
            ends: whether no such step follows.

        Returns:
            A gradient that cannot be applied, to be added to that of the next step; or None.
        """
        options = self._options

        def changed(left: Left, is_gradient: bool) -> Any:
            change = self.arithmetic.flushed(left, options, is_gradient, ends)
            return self._apply(change, key, variable, rate)

        if not (compressed and self.arithmetic.dense_is_stock):
            return changed(left, not compressed)
        steps = tf.cast(native(self.optimizer.iterations), tf.float64)
        bias = 1 - tf.pow(tf.constant(options.b2, tf.float64), steps)
        stock = {**left, SECOND: tf.cast(bias, tf.float32) * left[SECOND]}

        def apply() -> tf.Tensor:
            changed(stock, False)
            return tf.zeros_like(left[RESIDUAL])

        known = tf.reduce_any(tf.not_equal(left[SECOND], 0.0))  # otherwise the slots have everything
        return tf.cond(known, apply, lambda: tf.identity(left[RESIDUAL]))

    def _apply(self, change: Change, key: Key, variable: tf.Variable, rate: tf.Tensor | float) -> Any:
        slots, rate = self._slots(key, self.arithmetic.slots), rate if change.rate is None else change.rate
        if change.momentum is not None and MOMENTUM in slots:
            slots[MOMENTUM].assign_add(tf.cast(-rate * change.momentum, slots[MOMENTUM].dtype))
        for part, x in change.slots.items():
            slots[part].assign(tf.cast(x, slots[part].dtype))
        if change.step is not None:
            variable.assign_sub(tf.cast(rate * change.ahead * change.step, variable.dtype))
        return change.kept
